"""Tasks and answers from outside, damaged at random: a value or one line, within bounds."""

import json
import os
import random
from itertools import count

import pytest

from proxima.data import FieldError
from proxima.environment.protocol import Reply
from proxima.process.program import Program, ProgramFailed
from proxima.task import TASKS
from proxima_worlds import mcp
from proxima_worlds.mcp import Mcp, ToolServer
from proxima_worlds.openenv import OpenEnv
from tests.damaged import damaged
from tests.harbor_tasks import WORD, write_tasks

TOML_ODD = ["true", "-1", "nan", '"x"', "[]", "{}", "[[1]]", "1979-05-27", '{A = {B = "c"}}', "1e400"]


class Scripted(Program):
    """A program that answers each request with a message of this script."""

    def __init__(self, answer):
        self.name, self._numbers, self._answer, self._asked = "server", count(1), answer, None

    def write(self, message):
        self._asked = message

    def read(self):
        return self._answer(self._asked)


def server(answer):
    tools = object.__new__(ToolServer)
    tools.program = Scripted(answer)
    return tools


def replied(result):
    return lambda asked: {"id": asked["id"], "result": result}


@pytest.mark.parametrize("message", [{"result": None}, {}, {"error": None}, {"error": "x"}, {"error": {"message": 5}}])
def test_an_answer_without_a_result_is_one_line(message):
    with pytest.raises(ProgramFailed) as error:
        server(lambda asked: {"id": asked["id"], **message}).tools()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cursor", [lambda n: "same", lambda n: str(n), lambda n: {"page": n}])
def test_a_list_of_tools_has_an_end(cursor):
    asked = count()

    def answer(message):
        return {"id": message["id"], "result": {"tools": [], "nextCursor": cursor(next(asked))}}

    with pytest.raises(ProgramFailed, match="has no end"):
        server(answer).tools()
    assert next(asked) <= mcp.MOST_PAGES


TOOLS = {"tools": [{"name": "add", "description": "Add.", "inputSchema": {"type": "object", "properties": {}}}]}
TEXTS = {"content": [{"type": "text", "text": "4"}], "isError": False}
STEP = {"observation": {"text": "x"}, "reward": 1.0, "done": False}


def read_mcp(draw):
    tools = object.__new__(Mcp)
    tools.names = None
    tools.server = server(replied(damaged(draw, TOOLS)))
    tools.tools()


def call_mcp(draw):
    tools = object.__new__(Mcp)
    tools.server = server(replied(damaged(draw, TEXTS)))
    assert isinstance(tools.call_tool("add", {}), str)


def step_openenv(draw):
    environment = object.__new__(OpenEnv)
    environment.action = "text"
    environment.show = draw.choice([None, "text"])
    environment.number = 0
    environment.program = Scripted(replied(damaged(draw, STEP)))
    assert isinstance(environment.respond("x"), Reply)


def read_harbor(draw, folder, number):
    task = write_tasks(folder / str(number)) / "word"
    name = draw.choice(["task.toml", "task.toml", "instruction.md", "tests/test.sh"])
    place = task / name
    way = draw.randrange(8)
    if way in (0, 1, 2):
        place = task / "task.toml"
        lines = WORD["task.toml"].strip().split("\n")
        at = draw.randrange(len(lines))
        key = lines[at].partition("=")[0] or "x"
        lines[at] = f"{key} = {draw.choice(TOML_ODD)}" if way else draw.choice(["[", "]" * 9, "a.b.c = 1", "[" * 9000])
        place.write_text("\n".join(lines))
    elif way == 3:
        place.write_bytes(draw.randbytes(200))
    elif way == 4:
        place.unlink()
        place.symlink_to(draw.choice(["/etc/passwd", "/dev/zero", "/proc/self/environ", place.name, "../../nothing"]))
    elif way == 5:
        place.unlink()
        os.mkfifo(place)
    elif way == 6:
        with open(place, "r+b") as file:
            file.truncate(1 << 40)
    else:
        place.unlink()
        place.mkdir()
    row = TASKS["harbor"](path=str(task)).rows(0)[0]
    assert "root:" not in json.dumps(row.messages)


def one_line(read, *arguments):
    try:
        read(*arguments)
    except (FieldError, ProgramFailed, ValueError) as error:  # a ValueError is what the model sees of its tool
        assert "\n" not in str(error) and len(str(error)) < 6000, error
        return True
    return False


def fuzz(tmp_path, seed, number):
    draw = random.Random(seed)
    refused = dict.fromkeys((read_mcp, call_mcp, step_openenv, read_harbor), 0)
    for each in range(number):
        for read in (read_mcp, call_mcp, step_openenv):
            refused[read] += one_line(read, draw)
        refused[read_harbor] += one_line(read_harbor, draw, tmp_path, each)
    return list(refused.values())


@pytest.mark.slow
def test_a_few_damaged_tasks_and_answers(tmp_path):
    assert min(fuzz(tmp_path, 1, 12)) > 0


@pytest.mark.campaign("packages/proxima-worlds/tests/test_foreign_fuzz.py::test_a_few_damaged_tasks_and_answers")
def test_damaged_tasks_and_answers_are_one_line_each(tmp_path):
    assert min(fuzz(tmp_path, 2, 150)) > 20
