"""The same bytes to each server of ours: hosts, origins, numbers, nested bodies and requests that never end."""

import asyncio
import contextlib
import json
import socket
import threading

import pytest

from proxima.core import SURROGATES
from proxima.data.flow import Score
from proxima.reward.server.scorer_limits import ScorerLimits
from proxima.rollout.episodes.endpoint import ChatEndpoint
from proxima.rollout.episodes.formats.chat import ChatAnswer
from proxima.system.web_requests import name_in_host
from tests.reward.make import LONG, SHORT
from tests.reward.served import request_of, running, served
from tests.view.microscope import stored_run

NOTE = {"key": "1/0.0.0", "text": "odd"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
KEY = "Authorization: Bearer an-episode\r\n"
CLIENTS = 80  # more than the view answered at once


class Judge:
    def score(self, prompt, completions):
        return [Score(value=1.0) for _ in completions]


def view(folder, **limits):
    return stored_run.served([folder], **limits)


@contextlib.contextmanager
def scorer(folder, **limits):
    with served(Judge(), **limits) as made:
        yield int(made.url.rpartition(":")[2])


def agents(folder):
    async def answer(key, asked):
        return [ChatAnswer(content="hi")]

    return running(ChatEndpoint(("policy",), "an-episode".__eq__, answer, None, None)._server, asyncio.run)


SERVERS = {
    "view": (view, "/api/0/notes", NOTE, ""),
    "scorer": (scorer, "/score", request_of("a"), ""),
    "agents": (agents, "/v1/chat/completions", CHAT, KEY),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "one"
    stored_run.make_step(place, SURROGATES["cppo"](), prompts=1, samples=2, tokens=4)
    return place


@pytest.fixture(scope="module")
def ports(folder):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(server(folder)) for name, (server, *_) in SERVERS.items()}


def sent(port, name, *, host="localhost", more="", body=None, path=None, method="POST", length=None):
    """The status of a server's answer to these bytes; it must be one line of JSON with an error if it refuses."""
    _, its_path, its_body, key = SERVERS[name]
    body = json.dumps(its_body).encode() if body is None else body
    length = len(body) if length is None else length
    head = f"{method} {path or its_path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{key}{more}"
    with socket.create_connection(("127.0.0.1", port), timeout=LONG) as client:
        client.sendall(f"{head}Connection: close\r\nContent-Length: {length}\r\n\r\n".encode("latin-1") + body)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status == 200 or json.loads(content)["error"]
    return status


OWN, OTHERS = {"view": 200, "scorer": 200, "agents": 200}, {"view": 403, "scorer": 403, "agents": 200}
MALFORMED = {"view": 403, "scorer": 403, "agents": 400}
REFUSED = {"view": 400, "scorer": 400, "agents": 400}


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", OWN), ("[::1]:8000", OWN), ("evil.com", OTHERS), ("evil.com@localhost", MALFORMED), ("", MALFORMED)],
)
def test_hosts(ports, name, host, status):
    assert sent(ports[name], name, host=host) == status[name]


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", OWN),
        ("HTTPS://LOCALHOST:8000", OWN),
        ("http://localhost:3000", OTHERS),
        ("http://evil.com", OTHERS),
        ("http://evil.com@localhost:8000", REFUSED | {"agents": 200}),
        ("http://[", REFUSED | {"agents": 200}),  # nothing is allowed by an origin there: the key is asked for
        ("http://[::1].evil", REFUSED | {"agents": 200}),
        ("null", OTHERS),
        ("", OTHERS),
    ],
)
def test_origins(ports, name, origin, status):
    assert sent(ports[name], name, host="localhost:8000", more=f"Origin: {origin}\r\n") == status[name]


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"key": ' + b"9" * 5000 + b"}", REFUSED),
        (b"[" * 30_000, REFUSED | {"scorer": 413}),
        (b'{"a":' * 10_000, REFUSED | {"scorer": 413}),
        (b"\xff", REFUSED),
        (b"", REFUSED),
        (b"NaN", REFUSED | {"view": 404}),
        (b"5", REFUSED | {"view": 404}),
    ],
)
def test_bodies(ports, name, body, status):
    assert sent(ports[name], name, body=body) == status[name]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/api/{'9' * 5000}/trend", 400),
        (f"/api/0/step/{'9' * 5000}", 400),
        (f"/api/0/trend?after={'9' * 5000}", 404),
        (f"/api/0/step/{'9' * 300}", 404),
        ("/api/0/step/1/completion/%ff.0.0/token/%00", 404),
        ("/api/0/step/1/search?q=%ff%00&regex=1", 200),
    ],
)
def test_numbers_and_odd_bytes_in_a_path(ports, path, status):
    assert sent(ports["view"], "view", path=path, method="GET", body=b"") == status
    if status == 400:
        assert sent(ports["view"], "view", path=path, method="GET", body=b"", host="evil.com") == 403


@pytest.mark.parametrize("name", SERVERS)
def test_half_a_request_delays_nobody_and_holds_no_thread(ports, name):
    """Every second client has sent its headers, and a byte of the body."""
    _, path, _, key = SERVERS[name]
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Length: 100\r\n".encode()
    with contextlib.ExitStack() as stack:
        threads = threading.active_count()
        for number in range(CLIENTS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", ports[name]), timeout=LONG))
            client.sendall(head + b"\r\n{" if number % 2 else head[: number % 40])
        assert sent(ports[name], name) == 200
        assert name == "view" or threading.active_count() <= threads


@pytest.mark.slow
@pytest.mark.parametrize("name", ["view", "scorer"])
def test_half_a_header_ends(folder, name):
    with SERVERS[name][0](folder, read_seconds=SHORT) as port, contextlib.ExitStack() as stack:
        clients = [socket.create_connection(("127.0.0.1", port), timeout=LONG) for _ in range(3)]
        for client in map(stack.enter_context, clients):
            client.sendall(b"GET / HTTP/1.1\r\nHost: local")
        for client in clients:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["view", "scorer"])
def test_half_a_body_ends(folder, name, monkeypatch):
    monkeypatch.setattr(ScorerLimits, "read_seconds", SHORT)
    limits = {"read_seconds": SHORT} if name == "scorer" else {}
    with SERVERS[name][0](folder, **limits) as port:
        assert sent(port, name, body=b"{", length=100) == 408


def test_a_malformed_host_has_no_name():
    hosts = "localhost@evil.com [::1].evil [::1]evil:80 [localhost] [::1 localhost:80:80 localhost:http"
    assert not any(map(name_in_host, [*hosts.split(), "localhost/evil.com", "localhost?evil.com", "localhost:999999"]))


def test_the_name_in_a_host():
    hosts = ("Lab.Example:80", "[::1]:80", "[FE80::1%eth0]", "lab_1.example.", "a\nb", "a b", "::1", "[127.0.0.1]")
    assert [name_in_host(host) for host in hosts] == [
        "lab.example", "::1", "fe80::1%eth0", "lab_1.example.", "", "", "", "",
    ]  # fmt: skip
