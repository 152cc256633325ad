"""A session with a real OpenEnv server, where an interpreter has the package."""

import asyncio
import os
import socket
import subprocess
from contextlib import closing, contextmanager, suppress

import pytest

from proxima.environment.hosts import EnvironmentFailure, Hosts
from proxima.environment.interface import EnvironmentSpec
from tests.ports import kept_port
from tests.processes import eventually

PYTHON = os.environ.get("PROXIMA_OPENENV_PYTHON")
WITHOUT = "PROXIMA_OPENENV_PYTHON names no interpreter with the package openenv"
pytestmark = pytest.mark.skipif(not PYTHON, reason=WITHOUT)
ROW = {"messages": [{"role": "user", "content": ""}]}
SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Heard(Observation):
    heard: str

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self.steps = 0
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.steps = 0
        return Heard(heard=f"say something {seed}", done=False, reward=0.0)
    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        return Heard(heard=f"{self.steps}: {action.message}", done=self.steps == 3, reward=0.1 * len(action.message))
    @property
    def state(self):
        return State(step_count=self.steps)

app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=16)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@contextmanager
def serving(folder):
    """The address of a server."""
    file = folder / "server.py"
    file.write_text(SERVER)
    port = kept_port()
    server = subprocess.Popen([PYTHON, str(file), str(port)])

    def listens():
        assert server.poll() is None
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True

    try:
        eventually(listens)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("openenv")) as address:
        yield address


def hosts_of(**arguments):
    spec = EnvironmentSpec(kind="openenv", arguments={"python": PYTHON, **arguments})
    return Hosts(spec, workers=1, call_seconds=600)


@pytest.mark.slow
def test_two_sessions_at_once(url):
    hosts = hosts_of(url=url, action="message", show="heard")

    async def run():
        alone, two = [await hosts.open(ROW, seed) for seed in (4, 5)]
        first = [await alone.respond("a"), await alone.respond("bb")]
        other = await two.respond("ccc")
        two.drop()
        return alone.opening, two.opening, [*first, await alone.respond("dddd")], other

    with closing(hosts):
        opening, opening_two, answers, other = asyncio.run(run())
    assert opening[0]["content"] == "say something 4" and opening_two[0]["content"] == "say something 5"
    assert [a.messages[0]["content"] for a in answers[:2]] == ["1: a", "2: bb"]
    assert [a.reward for a in answers] == pytest.approx([0.1, 0.2, 0.4]) and [a.done for a in answers] == [0, 0, 1]
    assert other.messages[0]["content"] == "1: ccc"


@pytest.mark.slow
def test_actions_in_json_and_no_server(url):
    hosts = hosts_of(url=url)

    async def run():
        single = await hosts.open(ROW, 0)
        return [(await single.respond(text)).messages[0]["content"] for text in ("no", '{"message": "x"}')]

    with closing(hosts):
        bad, good = asyncio.run(run())
    assert bad == "error: the message must be a JSON object" and '"heard": "1: x"' in good
    gone = pytest.raises(EnvironmentFailure, match="ProgramFailed: .*9")
    with closing(hosts_of(url="http://127.0.0.1:9")) as nobody, gone:
        asyncio.run(nobody.open(ROW, 0))
