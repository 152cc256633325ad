"""Clients of a reward model's server that ask too much, say nothing, leave, or may not ask."""

import asyncio
import contextlib
import gzip
import json
import resource
import select
import socket
import threading
from http.client import HTTPConnection, IncompleteRead
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from proxima.data.flow import Score
from proxima.reward.http import Http
from proxima.reward.server.scorer_app import SLICE_COMPLETIONS
from proxima.system import bounded_server
from tests.processes import eventually
from tests.reward.make import LONG, SHORT, ask, runner
from tests.reward.served import post, request_of, running, served


class Judge:
    """The length of each text, in calls that can be stopped; `calls` holds the number of completions of each."""

    def __init__(self):
        self.calls, self.entered, self.gate = [], threading.Event(), threading.Event()
        self.gate.set()

    def score(self, prompt, completions):
        self.calls.append(len(completions))
        self.entered.set()
        assert self.gate.wait(LONG)
        if any(completion.text == "broken" for completion in completions):
            raise RuntimeError("the model\nis broken")
        return [Score(value=float(len(completion.text))) for completion in completions]

    def hold(self):
        self.entered.clear()
        self.gate.clear()


@pytest.fixture(scope="module")
def judge():
    return Judge()


@pytest.fixture(scope="module")
def shared(judge):
    with served(judge, hosts=("scorer.lan",), body_mb=1, characters=1000, completions=300, read_seconds=LONG) as caught:
        yield caught


def connected(url):
    place = urlsplit(url)
    return socket.create_connection((place.hostname, place.port), timeout=LONG)


def in_thread(call, *arguments):
    """The call's result, later."""
    made = SimpleNamespace(result=None)
    made.thread = threading.Thread(target=lambda: setattr(made, "result", call(*arguments)), daemon=True)
    made.thread.start()
    return made


@pytest.mark.slow
def test_a_token_is_required_where_there_is_one(judge, monkeypatch):
    with served(judge, token="secret") as scorer:
        asked = request_of("abc")
        status, answer = post(f"{scorer.url}/score", asked)
        assert status == 401 and answer["error"].startswith("a bearer token is required")
        for wrong in ("Bearer secre", "Bearer secret2", "Basic secret", "Bearer s\xe9cret"):
            assert post(f"{scorer.url}/score", asked, Authorization=wrong)[0] == 401
        assert post(f"{scorer.url}/other", asked)[0] == 401  # nor does it say what there is
        monkeypatch.setenv("SCORER_TOKEN", "secret")
        with runner(Http(url=f"{scorer.url}/score", token_env="SCORER_TOKEN")) as made:
            made.check()
            assert [s.value for s in ask(made, None, "abc", "de")] == [3.0, 2.0]
        with runner(Http(url=f"{scorer.url}/score")) as made, pytest.raises(ValueError, match="401 Unauthorized: a"):
            made.check()


def test_a_browser_may_not_ask_by_another_name_or_from_another_site(shared):
    """tests/system/test_web_requests.py has more of them."""
    for headers in ({"Host": "localhost.evil.example"}, {"Host": "localhost:8000", "Origin": "http://localhost:3000"}):
        status, answer = post(f"{shared.url}/score", request_of("a"), **headers)
        assert status == 403 and next(reversed(headers)) in answer["error"], headers
        assert post(f"{shared.url}/score/", request_of("a"), **headers)[0] == 403  # nor does it redirect them
    assert post(f"{shared.url}/score", request_of("a"), Host="SCORER.lan")[0] == 200


@pytest.mark.parametrize(
    ("content", "headers", "status", "why"),
    [
        (b"[" + b"[]," * 340_000 + b"1]", {}, 413, "the body: more than 200,000 objects and lists"),
        (b"[" * 100_000, {}, 413, "the body: more than 64 levels of objects and lists"),
        (b" " * (1 << 20) + b"{}", {}, 413, "the body has more than 1 MiB, --max-body-mb"),
        (gzip.compress(b" " * (8 << 20)), {"Content_Encoding": "gzip"}, 415, "Content-Encoding 'gzip' is not read"),
        (request_of(*["a"] * 301), {}, 413, "301 completions; the limit is 300, --max-completions"),
        (request_of("a", "b" * 1001), {}, 413, "completions[1].text: 1,001 characters; the limit is 1,000"),
    ],
)
def test_a_request_over_a_limit_is_refused_before_it_is_scored(shared, judge, content, headers, status, why):
    calls = len(judge.calls)
    response, answer = post(f"{shared.url}/score", content, **headers)
    assert response == status and why in answer["error"] and len(judge.calls) == calls
    assert shared.app.reader.held == 0


def test_a_chunked_body_is_measured_while_it_is_read(shared):
    with connected(shared.url) as client:
        client.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(64):  # 4 MiB, of which it holds 1
            client.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
            assert shared.app.reader.held <= (1 << 20) + 65536
        client.sendall(b"0\r\n\r\n")
        assert b"413" in client.recv(65536)


@pytest.mark.parametrize(("spared", "busy", "told"), [(0, 503, 503), (64, 429, 20), (8, 429, 429)])
def test_whoever_holds_all_bytes_leaves_small_bodies_to_others(spared, busy, told):
    """As many as are spared; `told`: the status, or the bytes of the body."""
    reader = bounded_server.BoundedReader((), 1 << 10, 10.0, spared=spared, busy=busy)
    reader.held = 16 << 10

    async def read():
        async def receive():
            return {"type": "http.request", "body": b" " * 20, "more_body": False}

        try:
            async with reader.body(Request({"type": "http", "headers": []}, receive), 1 << 10) as body:
                return len(body)
        except HTTPException as refusal:
            return refusal.status_code

    assert asyncio.run(read()) == told and reader.held == 16 << 10


def test_what_is_no_http_is_refused(shared):
    with connected(shared.url) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert b"".join(iter(lambda: _received(client), b"")).startswith(b"HTTP/1.1 400")


@pytest.mark.slow
def test_a_request_half_sent_after_another_ends_too(judge):
    with served(judge, read_seconds=1.0) as scorer, connected(scorer.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 ")
        client.sendall(b"POST /score HTTP/1.1\r\nHost: ")
        assert b"".join(iter(lambda: _received(client), b"")).count(b"HTTP/1.1") == 0


def _received(client):
    try:
        return client.recv(65536)
    except ConnectionResetError:
        return b""


@pytest.mark.slow
def test_connections_are_bounded(judge, monkeypatch):
    monkeypatch.setattr(bounded_server, "CROWDED_SECONDS", LONG)  # none is closed for a newer one
    with served(judge, connections=3, read_seconds=LONG) as scorer, contextlib.ExitStack() as open_ones:
        clients = [open_ones.enter_context(connected(scorer.url)) for _ in range(5)]
        eventually(lambda: len(select.select(clients, [], [], 0)[0]) == 2)  # closed
        assert len(scorer.server.server_state.connections) == 3


def test_connections_without_a_request_keep_nobody_out(judge, monkeypatch):
    """The one that has waited longest is closed, and not one whose scores are computed."""
    with served(judge, connections=3, read_seconds=LONG) as scorer, contextlib.ExitStack() as open_ones:
        judge.hold()
        busy = in_thread(post, f"{scorer.url}/score", request_of("abc"))
        assert judge.entered.wait(LONG)
        half = open_ones.enter_context(connected(scorer.url))
        half.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        eventually(lambda: len(scorer.server.server_state.tasks) == 2)
        silent = open_ones.enter_context(connected(scorer.url))
        eventually(lambda: len(scorer.server.server_state.connections) == 3)
        monkeypatch.setattr(bounded_server, "CROWDED_SECONDS", 0.0)
        assert _received(half) == b""
        monkeypatch.setattr(bounded_server, "CROWDED_SECONDS", LONG)
        again = open_ones.enter_context(connected(scorer.url))
        again.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert again.recv(65536).startswith(b"HTTP/1.1 404")
        judge.gate.set()
        busy.thread.join()
        assert busy.result == (200, {"scores": [{"value": 3.0}]}) and not select.select([silent], [], [], 0)[0]


def test_connections_leave_half_of_the_files_to_the_process(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 2048)
    monkeypatch.setattr(bounded_server, "MOST_FILES", most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert bounded_server.BoundedServer(None, 1.0, most).most == most // 2
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        assert bounded_server.BoundedServer(None, 1.0, 8).most == 8
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_refusal_before_the_body_says_that_the_connection_ends(judge):
    with served(judge, token="secret") as scorer:
        with connected(scorer.url) as client:
            client.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n")
            assert b"\r\nconnection: close\r\n" in client.recv(65536)
        with connected(scorer.url) as client:
            client.sendall(b"GET /score HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"connection: close" not in client.recv(65536)


def test_an_error_that_was_answered_does_not_close_the_connection():
    """Starlette raises what it has answered once more; the client may have sent its next request by then."""

    async def fails(request):
        await request.body()
        raise OSError("no space left")

    async def breaks_off(request):
        async def parts():
            yield b"a part"
            raise OSError("no space left")

        return StreamingResponse(parts())

    async def told(request, error):
        return PlainTextResponse(str(error), 429)

    routes = [Route("/", fails, methods=["POST"]), Route("/parts", breaks_off)]
    app = Starlette(routes=routes, exception_handlers={Exception: told})
    server = bounded_server.BoundedServer(app, LONG, 8)
    with running(server, asyncio.run) as port, contextlib.closing(HTTPConnection("127.0.0.1", port, LONG)) as client:
        for _ in range(3):
            client.request("POST", "/", b"{}")
            answer = client.getresponse()
            assert answer.status == 429 and answer.read() == b"no space left"
            assert not answer.will_close and not select.select([client.sock], [], [], 0.2)[0]  # neither end nor reset
        client.request("GET", "/parts")
        with pytest.raises(IncompleteRead) as caught:  # what broke off must not look whole
            client.getresponse().read()
        assert caught.value.partial == b"a part"


def test_the_rest_of_a_refused_body_is_discarded_unparsed(judge, monkeypatch):
    """The client reads the refusal although it has not sent all, and the end of the connection behind it."""
    with served(judge, token="secret", read_seconds=LONG) as scorer, connected(scorer.url) as client:
        client.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n ")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 401") and b"a bearer token is required" in answer
        (connection,) = scorer.server.server_state.connections
        client.sendall(b"no size of a chunk")
        eventually(lambda: connection.discarded == 18)
        monkeypatch.setattr(bounded_server, "MOST_DISCARDED", 20)
        client.sendall(b"...")
        eventually(lambda: not scorer.server.server_state.connections)


def test_a_large_request_delays_a_small_one_by_a_slice(shared, judge):
    judge.calls.clear()
    judge.hold()
    large = in_thread(post, f"{shared.url}/score", request_of(*["ab"] * 300))
    assert judge.entered.wait(LONG)
    small = in_thread(post, f"{shared.url}/score", request_of("abc"))
    eventually(lambda: shared.app.waiting == 2)
    judge.gate.set()
    large.thread.join()
    small.thread.join()
    assert small.result == (200, {"scores": [{"value": 3.0}]})
    assert large.result == (200, {"scores": [{"value": 2.0}] * 300})
    assert judge.calls[:3] == [SLICE_COMPLETIONS, SLICE_COMPLETIONS, 1] or judge.calls[:2] == [SLICE_COMPLETIONS, 1]
    assert sum(judge.calls) == 301


def test_a_client_that_leaves_takes_its_work_with_it(shared, judge, capfd):
    judge.calls.clear()
    judge.hold()
    body = json.dumps(request_of(*["ab"] * 300)).encode()
    with connected(shared.url) as client:
        client.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert judge.entered.wait(LONG)
    eventually(lambda: shared.app.waiting == 0)
    judge.gate.set()
    assert post(f"{shared.url}/score", request_of("a"))[0] == 200
    assert judge.calls == [SLICE_COMPLETIONS, 1] and shared.app.reader.held == 0
    log = capfd.readouterr().err
    assert "the client left" in log and "Traceback" not in log


def test_a_client_that_leaves_while_it_sends_is_a_line(shared, capfd):
    with connected(shared.url) as client:
        client.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    said = []
    eventually(lambda: said.append(capfd.readouterr().err) or "the client left" in "".join(said))
    assert "Traceback" not in "".join(said)


def test_a_model_that_fails_costs_its_request_alone(shared, capfd):
    assert post(f"{shared.url}/score", request_of("broken")) == (500, {"error": "RuntimeError: the model is broken"})
    assert post(f"{shared.url}/score", request_of("a"))[0] == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_more_than_can_wait_is_told(judge):
    with served(judge, requests=1, seconds=LONG) as scorer:
        judge.hold()
        first = in_thread(post, f"{scorer.url}/score", request_of("a"))
        assert judge.entered.wait(LONG)
        status, answer = post(f"{scorer.url}/score", request_of("b"))
        assert status == 503 and answer["error"] == "1 requests wait; the limit is --max-requests"
        judge.gate.set()
        first.thread.join()
        assert first.result == post(f"{scorer.url}/score", request_of("c")) == (200, {"scores": [{"value": 1.0}]})


@pytest.mark.slow
def test_longer_than_may_be_waited_is_told(judge):
    with served(judge, seconds=SHORT) as scorer:
        judge.hold()
        status, answer = post(f"{scorer.url}/score", request_of("a"))
        assert status == 503 and f"not scored within {SHORT:g} s" in answer["error"]
        judge.gate.set()
        eventually(lambda: post(f"{scorer.url}/score", request_of("c")) == (200, {"scores": [{"value": 1.0}]}))


@pytest.mark.slow
def test_an_end_refuses_those_that_wait(judge, monkeypatch):
    monkeypatch.setattr(bounded_server, "GRACE_SECONDS", int(LONG))
    judge.hold()
    with served(judge) as scorer:
        waiting = [in_thread(post, f"{scorer.url}/score", request_of("a")) for _ in range(3)]
        eventually(lambda: scorer.app.waiting == 3)
        half = connected(scorer.url)
        half.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        eventually(lambda: len(scorer.server.server_state.tasks) == 4)
        scorer.server.should_exit = True
        for asked in waiting:
            asked.thread.join()
        judge.gate.set()
    assert {asked.result[0] for asked in waiting} == {503} and _received(half) == b""
    assert {asked.result[1]["error"] for asked in waiting} == {"the server is shutting down"}
    half.close()
