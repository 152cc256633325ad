"""What a class offers, and every complaint before the run."""

import asyncio
import re
from contextlib import closing

import pytest
from transformers.utils import chat_template_utils

from proxima.data import FieldError
from proxima.data.episode import ToolCall
from proxima.environment.hosts import Hosts
from proxima.environment.interface import EnvironmentInterface, EnvironmentSpec, read_interface

pytestmark = pytest.mark.usefixtures("lent_servers")
SCHEMALESS = "has the tool 'turn' without a schema: "
BAD = {
    "NoTypes": f"{SCHEMALESS}Argument way is missing a type hint in function turn; give every parameter a type",
    "NoDocstring": f"{SCHEMALESS}Cannot generate JSON schema for turn because it has no docstring",
    "NoArgs": f"{SCHEMALESS}Cannot generate JSON schema for turn because the docstring has no description",
    "Unknown": f"{SCHEMALESS}Couldn't convert the type hint",
    "Stars": "has the tool 'turn' with the parameter *ways: str; name its parameters",
    "Nothing": "has neither a tool nor a method `respond`; a tool is a public method with types and a docstring",
    "Raises": "can't be made: OSError: no board",
    "WrongProperties": 'lists a tool that is not a schema: "turn".function.parameters.properties: must be an object',
    "Missing": "has no 'Missing'; known: ",
    "Raise": "has no 'Raise'; did you mean 'Raises'?",
}


@pytest.fixture(autouse=True)
def torch_is_there_again(monkeypatch):
    """What a worker tells transformers must not be told in this process."""
    monkeypatch.setattr(chat_template_utils, "is_torch_available", chat_template_utils.is_torch_available)


@pytest.mark.parametrize("name", BAD)
def test_a_class_that_is_no_environment(name):
    kind = f"tests.environment.bad_worlds:{name}"
    with pytest.raises(FieldError) as raised:
        read_interface(**vars(EnvironmentSpec(kind=kind)))
    assert raised.value.field == "environment" and raised.value.value == kind
    assert BAD[name] in str(raised.value) and "\n" not in str(raised.value)


CALCULATE, OTHER = (f"{module}:calculate" for module in ("proxima.environment.builtin", "tests.environment.bad_worlds"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "gues"}, "environment='gues' is unknown; did you mean 'guess'?"),
        ({"kind": "./maze.py:Maze"}, "must be module:Class; as maze:Maze, from this folder or PYTHONPATH"),
        ({"kind": "no_such_module:Maze"}, "can't be imported: there is no module 'no_such_module'; put its folder"),
        ({"kind": "guess", "arguments": {"lo": 1}}, "got an unexpected keyword argument 'lo'; it takes (lo"),
        ({"kind": "guess", "arguments": {"guesses": 0}}, "environment.guesses=0 must be"),
        ({"kind": "python", "arguments": {"seconds": 0}}, "environment.seconds=0 must be"),
        ({"kind": "python", "arguments": {"memory_mb": 1}}, "environment.memory_mb=1 must be"),
        ({"kind": "python", "arguments": {"characters": 1}}, "environment.characters=1 must be"),
        ({"kind": "calculator", "tools": (CALCULATE,)}, "has a method 'calculate', and tools has a function of this"),
        ({"tools": (CALCULATE, OTHER)}, "is a second tool named 'calculate'; rename or remove one"),
        ({"tools": (CALCULATE, CALCULATE)}, "is a second tool named 'calculate'; rename or remove one"),
        ({"tools": ("calculate",)}, "tools='calculate' must be module:function; as calculate:function"),
        ({"tools": ("tests.environment.bad_worlds:untyped",)}, "has the tool 'untyped' without a schema"),
        ({}, "tools=[] names no tool"),
    ],
)
def test_a_recipe_that_names_no_environment(fields, message):
    with pytest.raises(FieldError, match=re.escape(message)):
        read_interface(**vars(EnvironmentSpec(**fields)))


def test_a_complaint_comes_back_from_the_worker_whole():
    with pytest.raises(FieldError) as raised:
        Hosts(EnvironmentSpec(kind="guess", arguments={"high": 1}))
    error = raised.value
    assert (error.field, error.value, error.bound) == ("environment.high", 1, "must be above low=1")


@pytest.mark.slow
def test_an_import_that_ends_or_hangs_does_not_end_or_hang_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, body, seconds, message in [
        ("exits", "import os; os._exit(0)", 600.0, "can't be loaded: its worker ended"),
        ("sleeps", "import time; time.sleep(600)", 0.2, "can't be loaded: timed out after 0.2 s"),
        ("broken", "1 +", 600.0, "can't be imported: SyntaxError"),
        ("absent", "import nothing_like_this", 600.0, "there is no module 'nothing_like_this'"),
    ]:
        (tmp_path / f"{name}_world.py").write_text(body)
        with pytest.raises(FieldError, match=re.escape(message)):
            Hosts(EnvironmentSpec(kind=f"{name}_world:World"), start_seconds=seconds)


DIES = """
import os, pathlib, signal

class World:
    def __init__(self):
        log = pathlib.Path("log.txt")
        killed = log.read_text().split() if log.exists() else []
        log.write_text(" ".join([*killed, str(os.getppid())]))
        if len(killed) < {times}:
            os.kill(os.getppid() if {server} else os.getpid(), signal.SIGKILL)
            signal.pause()

    def respond(self, text):
        return text
"""


@pytest.mark.slow
@pytest.mark.parametrize("server", [True, False])
def test_what_dies_while_it_is_inspected_is_retried_twice(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for times in (2, 3):
        (tmp_path / f"dies_{times}.py").write_text(DIES.format(times=times, server=server))
    hosts = Hosts(EnvironmentSpec(kind="dies_2:World"))
    hosts.close()
    servers = (tmp_path / "log.txt").read_text().split()
    assert hosts.interface.responds and len(servers) == 3 and len(set(servers)) == 1 + 2 * server
    (tmp_path / "log.txt").unlink()
    with pytest.raises(FieldError, match="environment='dies_3:World' can't be loaded: its worker (ended|died)"):
        Hosts(EnvironmentSpec(kind="dies_3:World"))


SILENT = """
import socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
while control.recv(4096):
    pass
"""


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_a_server_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "silent.py").write_text(SILENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("proxima.process.worker.FORK_SERVER", "silent")
    monkeypatch.setattr("proxima.process.worker.START_SECONDS", 0.1)
    with pytest.raises(FieldError, match="tools=.'a:b'. can't be loaded: .* did not answer within 0.1 s"):
        Hosts(EnvironmentSpec(tools=("a:b",)), start_seconds=0.1)


DESCRIBED = {"amount": "What to add.", "times": "How often."}


@pytest.mark.slow
def test_a_class_written_for_trl_runs_unchanged():
    hosts = Hosts(EnvironmentSpec(kind="tests.environment.worlds:Adder"), workers=1)
    interface = hosts.interface
    assert list(interface.tools) == ["add", "peek"] and not interface.responds and interface.reward == "get_reward"
    properties = {name: {"type": "integer", "description": said} for name, said in DESCRIBED.items()}
    assert interface.tools["add"] == {"type": "object", "properties": properties, "required": ["amount"]}

    async def run():
        row = {"messages": [{"role": "user", "content": "Add."}], "target": 4, "other": None}
        instance, other = await hosts.open(row, seed=0), await hosts.open(row, seed=0)
        many, single = {"amount": 2, "times": "2"}, {"amount": 1}
        calls = [("add", many), ("peek", {})]
        answers = await instance.call([ToolCall(name=name, arguments=arguments) for name, arguments in calls])
        answers += await other.call([ToolCall(name="add", arguments=a) for a in (many, single)])
        contents = [answer.messages[0]["content"] for answer in answers]
        return instance.opening, contents, await instance.end(), await other.end()

    with closing(hosts):
        opening, contents, *rewards = asyncio.run(run())
    assert opening == ({"role": "user", "content": "Add. The total is 0, the target 4."},)
    assert contents == ["4", '{"total": 4}', "4", "error: Game over."] and rewards == [1.0, 0.0]


def test_columns_that_reset_needs():
    hosts = Hosts(EnvironmentSpec(kind="tests.environment.worlds:Columns"))
    hosts.close()
    interface = hosts.interface
    assert interface.columns == ("b",) and interface.responds and interface.reward == ""
    interface.require_columns(["a", "b"])
    with pytest.raises(FieldError, match="has a reset.. with the parameter 'b', which is not a column; .* a column: a"):
        interface.require_columns(["a"])


EITHER = {"anyOf": [{"type": "integer"}, {"type": "array"}]}
ARGUMENTS = [  # a schema, values and what they become, and values that are refused
    ({"type": "integer"}, [(5, 5), ("5", 5), (5.0, 5), ("5.0", 5)], [5.5, True, None]),
    ({"type": "number"}, [(5, 5), ("0.5", 0.5)], ["1e999"]),
    ({"type": "string"}, [(5, "5"), ("5", "5")], [["5"]]),
    ({"type": "boolean"}, [("true", True), ("False", False)], [1]),
    ({"type": "array", "items": {"type": "integer"}}, [("[1, 2]", [1, 2]), (["1", 2], [1, 2])], [["x"]]),
    ({"type": "object"}, [('{"a": 1}', {"a": 1})], []),
    ({"type": ["integer", "string"]}, [("5", "5")], []),
    ({"type": "integer", "nullable": True}, [(None, None)], []),
    ({"type": "string", "enum": ["a", "b"]}, [("a", "a")], ["c"]),
    (EITHER, [([1], [1])], ["x"]),
    ({}, [({"any": [1]}, {"any": [1]})], []),
]


@pytest.mark.parametrize(("schema", "taken", "refused"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_arguments_as_the_types_want_them(schema, taken, refused):
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {"x": schema}}}
    interface = EnvironmentInterface(schemas=({"type": "function", "function": function},))
    for value, typed in taken:
        (got,) = interface.arguments_of(ToolCall(name="f", arguments={"x": value})).values()
        assert got == typed and type(got) is type(typed)
    for value in refused:
        with pytest.raises(ValueError, match="^x must be .*, not "):
            interface.arguments_of(ToolCall(name="f", arguments={"x": value}))
