"""No client asks a proxy for this machine: neither ours, nor those of the programs that a run starts."""

import asyncio
import contextlib
import importlib.util
import socket
import sys
import threading

import pytest

from proxima.cli.main import main
from proxima.data import UserError
from proxima.engine.http.client import Address, ServerClient
from proxima.environment.agent_kinds import AgentSpec
from proxima.environment.agents import AgentJob
from proxima.process.program import Program
from proxima.reward.http import Http
from proxima.system.http_clients import async_http_client, http_client
from proxima.system.proxies import EXEMPT, PROXIES, exempt_this_machine, reaches_this_machine
from tests.reward.server import scorer

KINDS = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "SOCKS")
ASKING = """
import json, os, sys, urllib.request
url = os.environ.get("OPENAI_BASE_URL") or sys.argv[1]
ask = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
urllib.request.urlopen(ask, timeout=30).read()
import requests
requests.post(url, json={}, timeout=30).raise_for_status()
if not os.environ.get("ALL_PROXY", "").startswith("socks"):  # without socksio httpx makes no client at all
    import httpx
    httpx.post(url, json={}, timeout=30).raise_for_status()
print(json.dumps({"asked": url} if sys.argv[1:] else 0.5))
"""


class Proxy:
    """Counts its connections, and answers each with 502."""

    def __init__(self):
        self.asked = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    self.asked.append(connection.recv(4096))
                    connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def close(self):
        self._socket.close()


@pytest.fixture
def proxy():
    with contextlib.closing(Proxy()) as made:
        yield made


@pytest.fixture(params=KINDS)
def behind(request, proxy, monkeypatch):
    """The environment of a user behind this proxy, by each kind of variable."""
    for name in {*PROXIES, *map(str.upper, PROXIES), *EXEMPT}:
        monkeypatch.setenv(name, "x")  # so that it is as before after the test
        monkeypatch.delenv(name)
    name, scheme = ("ALL_PROXY", "socks5") if request.param == "SOCKS" else (request.param, "http")
    for variable in (name, name.lower()):
        monkeypatch.setenv(variable, f"{scheme}://{proxy.address}")
    return request.param


@pytest.fixture
def server():
    with scorer(lambda request, number: {"scores": []}) as made:
        yield made


async def asked_as_an_engine(url):
    client = ServerClient(Address(url))
    try:
        return await client.post("/", {})
    finally:
        await client.close()


def test_our_clients_ask_no_proxy(behind, proxy, server):
    Http(url=server.url, retries=0, seconds=30).check()
    assert http_client(server.url, timeout=30).post(server.url, json={}).status_code == 200
    assert asyncio.run(asked_as_an_engine(server.url.removesuffix("/score"))) == {"scores": []}
    assert len(server.requests) == 3 and not proxy.asked


@pytest.mark.slow
def test_programs_that_a_run_starts_ask_no_proxy(behind, proxy, server, capfd):
    """An agent by what it is given, and all others by what they inherit."""
    job = AgentJob(row={}, base_url=server.url, api_key="key")

    async def played():
        agents = AgentSpec(command=(sys.executable, "-c", ASKING)).build()
        with contextlib.closing(agents):
            return await agents.play(job)

    assert asyncio.run(played()) == 0.5
    assert main(["list", "surrogates"]) == 0
    program = Program((sys.executable, "-c", ASKING, server.url), guarded=True)
    try:
        assert program.read() == {"asked": server.url}
    finally:
        program.kill()
    assert not proxy.asked, proxy.asked


def test_other_addresses_are_asked_through_the_proxy(behind, proxy):
    reward = Http(url="http://scorer.example:81/score", retries=0, seconds=30)
    if behind == "SOCKS" and importlib.util.find_spec("socksio") is None:
        with pytest.raises(UserError, match="ALL_PROXY: a SOCKS proxy needs the package socksio; pip install"):
            reward.check()
    elif behind in ("HTTP_PROXY", "ALL_PROXY"):
        reward.check()
        assert proxy.asked[0].startswith(b"POST http://scorer.example:81/score")


def test_an_engine_on_another_machine_is_asked_without_the_proxy(monkeypatch):
    """It would see every prompt; only who says `proxied` is asked through it."""
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("OUR_KEY", "a-key-of-ours")
    url = "http://10.0.0.1:8000"
    for make in (http_client, async_http_client):
        assert make(url)._mounts == {}
        assert make(url, proxied=True)._mounts != {}
        assert make("http://127.0.0.1:8000", proxied=True)._mounts == {}
    assert ServerClient(Address(url, token_env="OUR_KEY", allow_remote=True))._http._mounts == {}


def test_a_proxy_without_a_usable_address_is_one_line(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HTTP_PROXY", "ftp://proxy:3128")
    with pytest.raises(UserError, match="HTTP_PROXY: .*ftp://proxy:3128.*; correct the proxy's address, or unset it"):
        Http(url="http://scorer.example/score", retries=0).check()


def test_what_the_user_exempts_stays_exempt():
    added = "127.0.0.1,localhost,::1"
    for given, expected in (
        ({"HTTP_PROXY": "p"}, added),
        ({"https_proxy": "p", "NO_PROXY": "corp.example, 10.0.0.1"}, f"corp.example,10.0.0.1,{added}"),
        ({"ALL_PROXY": "p", "no_proxy": "localhost"}, "localhost,127.0.0.1,::1"),
        ({"ALL_PROXY": "p", "NO_PROXY": "*"}, "*"),
    ):
        assert exempt_this_machine(given) == {"no_proxy": expected, "NO_PROXY": expected}
    assert exempt_this_machine({"NO_PROXY": "corp.example", "HTTP_PROXY": ""}) == {}
    boxed = AgentJob(row={}, base_url="", api_key="").variables("http://127.0.0.1:7/v1")
    assert set(added.split(",")) <= {*boxed["NO_PROXY"].split(",")}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST.", "a.localhost", "::1", "0.0.0.0"])
def test_hosts_of_this_machine(host):
    assert reaches_this_machine(host)
    assert not reaches_this_machine(f"{host}.example") and not reaches_this_machine("10.0.0.1")
