"""Tools of MCP servers: one of the standard library, and the package's own where an interpreter has it."""

import asyncio
import os
import sys
from contextlib import closing
from pathlib import Path

import pytest

from proxima.data import FieldError
from proxima.data.episode import ToolCall
from proxima.environment.hosts import EnvironmentFailure, Hosts
from proxima.environment.interface import EnvironmentSpec
from tests.processes import assert_all_end, family

pytestmark = pytest.mark.usefixtures("lent_servers")
COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
ROW = {"messages": [{"role": "user", "content": "2 + 2?"}]}
TEN_LINES = """
from mcp.server import MCPServer
server = MCPServer("adder")
@server.tool()
def add(a: int, b: int) -> str:
    "Add two numbers."
    return str(a + b)
server.run()
"""


def spec(**arguments):
    return EnvironmentSpec(kind="mcp", arguments={"command": COMMAND, **arguments})


def play(given, *calls):
    """The tools, and the texts that answered the calls, of two episodes at once."""

    async def run(hosts):
        both = [await hosts.open(ROW, seed) for seed in range(2)]
        asked = [ToolCall(name=name, arguments=arguments) for name, arguments in calls]
        return [[a.messages[0]["content"] for a in await each.call(asked)] for each in both]

    with closing(Hosts(given, workers=1)) as hosts:
        return list(hosts.interface.tools), asyncio.run(run(hosts))


@pytest.mark.slow
def test_tools_of_a_server():
    calls = [("add", {"a": 2, "b": "3"}), ("count", {}), ("count", {}), ("fail", {}), ("add", {"a": 1}), ("reset", {})]
    tools, (first, two) = play(spec(), *calls)
    assert tools == ["add", "count", "fail", "leave"]
    assert first == two and first[:3] == ["5", "1", "2"]
    assert first[3:5] == ["error: no way", "error: add needs the argument 'b'"]
    assert first[5].startswith("error: there is no tool 'reset'")


@pytest.mark.slow
def test_some_of_its_tools_and_one_server_for_all():
    tools, (first, two) = play(spec(tools=["count"], shared=True), ("count", {}), ("count", {}))
    assert tools == ["count"] and (first, two) == (["1", "2"], ["3", "4"])


@pytest.mark.slow
def test_a_server_that_ends_fails_its_episode():
    with pytest.raises(EnvironmentFailure, match="ended with exit code 3: goodbye"):
        play(spec(), ("leave", {}))


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_no_server_is_left():
    hosts = Hosts(spec(), workers=1)

    async def opened():
        return [await hosts.open(ROW, seed) for seed in range(2)]

    episodes = asyncio.run(opened())
    running = family(hosts._server.child.process.pid)
    hosts.close()
    assert len(running) >= 3 + len(episodes)
    assert_all_end(running)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"command": "server"}, "must be a list of a program"),
        ({"command": ["/no/such/program"]}, "can't be started: No such file"),
        ({"command": ["/bin/echo", "hello"]}, "wrote something that is not a message: 'hello"),
        ({"command": ["/bin/false"]}, "ended with exit code 1"),
        ({"tools": ["subtract"]}, "is not a tool of the server; it has add, count, fail, leave"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, says):
    with pytest.raises(FieldError) as error:
        Hosts(spec(**arguments), workers=1)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_the_packages_own_server(tmp_path):
    python = os.environ.get("PROXIMA_MCP_PYTHON")
    if not python:
        pytest.skip("PROXIMA_MCP_PYTHON names no interpreter with the package mcp")
    (tmp_path / "server.py").write_text(TEN_LINES)
    tools, (first, two) = play(spec(command=[python, str(tmp_path / "server.py")]), ("add", {"a": 2, "b": 3}))
    assert tools == ["add"] and first == two == ["5"]
