"""Your own function, in a worker process: what it may return, and what it may do wrong."""

import os
import re
import signal
import textwrap
from pathlib import Path

import pytest

from proxima.reward.function import Function
from tests.processes import assert_all_end, family
from tests.refusals import refused
from tests.reward.make import SHORT, ask, completion, hurry, prompt, runner, scored

pytestmark = pytest.mark.usefixtures("lent_servers")

SOURCE = """
import asyncio, os, sys, time
from dataclasses import replace
from decimal import Decimal
from proxima.data.flow import Completion, Prompt, Score
from neighbour import BONUS

CALLS = []

def length(prompt: Prompt, completion: Completion):
    return len(completion.text) + BONUS

def parts(prompt, completion):
    return {"value": 0.5, "correct": completion.text == prompt.answer, "style": 0.25, "n": len(CALLS)}

def score(prompt, completion):
    return Score(value=2.0, correct=True, parts={"a": 1.0})

async def awaited(prompt, completion):
    await asyncio.sleep(0)
    return prompt.metadata["bonus"]

def facts(prompt, completion):
    kinds = type(prompt.messages), type(prompt.tokens), type(completion.tokens), type(completion.policy_version)
    names = [kind.__name__ for kind in kinds]
    return prompt.question == "?" and names == ["tuple"] + ["ndarray"] * 3 and completion.truncated is False

def wild(prompt, completion):
    text = completion.text
    print("this goes nowhere")
    if text == "raise": raise KeyError("gone")
    if text == "hang": time.sleep(6000)
    if text == "spin":
        while True: pass
    if text == "exit": sys.exit(1)
    if text == "die": os._exit(1)
    if text == "nan": return float("nan")
    if text == "text": return "good"
    if text == "none": return None
    if text == "dict": return {"reward": 1}
    if text == "invalid": return Score.failed("no opinion")
    if text == "correct": return {"value": 1, "correct": "yes"}
    if text == "huge": return 10**400
    if text == "endless": return 10**5000
    if text == "decimal": return Decimal("0.5")
    if text == "part": return {"value": 1, "style": float("nan")}
    if text == "object": return {"value": 1, "style": object()}
    return True

def forks(prompt, completion):
    if completion.text == "fork":
        pid = os.fork()
        if pid == 0: return 777.0  # the child should have ended by os._exit
        os.waitpid(pid, 0)
    if completion.text == "deep": return forks(prompt, completion)
    return len(completion.text)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "my_reward.py").write_text(textwrap.dedent(SOURCE))
    (folder / "neighbour.py").write_text("BONUS = 100\n")
    return folder


def run(folder, functions, *texts, **metadata):
    rewards = [Function(path=f"{folder}/my_reward.py:{name}") for name in functions]
    return scored(rewards, prompt("42", **metadata), *texts)


@pytest.mark.slow
def test_what_a_function_may_return(folder):
    names = ("length", "parts", "score", "awaited", "facts")
    first, second = run(folder, names, "42", "forty-two", bonus=7)
    assert first.error is None
    own = {"length": 102, "parts": 0.5, "score": 2.0, "awaited": 7.0, "facts": 1.0}
    assert first.parts == own | {"parts/style": 0.25, "parts/n": 0, "score/a": 1.0}
    assert first.value == 102 + 0.5 + 2 + 7 + 1 and first.correct is True
    assert second.parts["length"] == 109 and second.correct is False


WRONG = {
    "raise": "KeyError: 'gone' (my_reward.py:31)",
    "hang": f"timed out after {SHORT:g} s",
    "spin": f"timed out after {SHORT:g} s",
    "exit": "SystemExit: 1",
    "die": "its worker ended",
    "nan": "ValueError: returned nan, expected a finite number",
    "text": "ValueError: returned value='good', expected a number",
    "none": "ValueError: returned value=None, expected a number",
    "dict": "ValueError: returned a dict without 'value' (keys: reward)",
    "invalid": "RuntimeError: no opinion",
    "correct": "ValueError: returned correct='yes', expected true, false or nothing",
    "huge": f"ValueError: returned value=1{'0' * 79}, expected a number",
    "endless": "ValueError: returned value=a number of thousands of digits, expected a number",
    "part": "ValueError: returned style=nan, expected a finite number; a part without a value is left out",
    "object": "ValueError: returned style=<object object at ",
}


@pytest.mark.slow
def test_what_a_function_may_do_wrong_costs_one_completion_each(folder, monkeypatch):
    hurry(monkeypatch, "hang", "spin")
    texts = ("fine", *WRONG, "decimal", "fine")
    scores = run(folder, ["wild"], *texts)
    assert [score.value for score in scores if score.valid] == [1.0, 0.5, 1.0]
    errors = {text: score.error for text, score in zip(texts, scores, strict=True) if not score.valid}
    errors["object"] = errors["object"].partition("0x")[0]
    assert errors == {text: f"wild: {error}" for text, error in WRONG.items()}


@pytest.mark.slow
def test_a_child_that_returns_and_a_recursion_without_end_shift_no_score(folder):
    with runner(Function(path=f"{folder}/my_reward.py:forks")) as made:
        texts = (["a", "bb", "fork", "ccc", "fork", "deep", "eeeee"], ["a" * 10, "b" * 20], ["c" * 30])
        messages = [ask(made, None, *row) for row in texts]
    values = [[score.value if score.valid else None for score in row] for row in messages]
    assert values == [[1, 2, 4, 3, 4, None, 5], [10, 20], [30]]
    assert messages[0][5].error.startswith("forks: RecursionError: maximum recursion depth exceeded")


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="Linux only")
def test_where_memory_runs_out_the_worker_ends_and_not_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("def place(p, c):\n    return float(open('/proc/self/oom_score_adj').read())\n")
    (score,) = scored([Function(path=f"{tmp_path}/mine.py:place")], "42", "x")
    assert score.value == 1000.0


def test_a_relative_file_is_found_from_where_the_run_began(folder, monkeypatch):
    monkeypatch.chdir(folder)
    reward = Function(path="./my_reward.py:length")
    assert reward.label == "length" and reward.absolute_path == f"{folder}/my_reward.py:length"
    assert reward.score(prompt(), [completion("abc")])[0].value == 103


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_reward.py", "must be 'package.module:function' or './file.py:function'"),
        (":fn", "must be 'package.module:function'"),
        ("{folder}/nope.py:length", "names a file that does not exist, '.*nope.py'"),
        ("{folder}/my_reward.py:lenght", "has no function 'lenght'; did you mean 'length'?"),
        ("{folder}/my_reward.py:CALLS", "has no function 'CALLS'"),
        ("{folder}/broken.py:fn", "broken.py', which can't be loaded: SyntaxError"),
        ("no_such_package.rewards:fn", "no module 'no_such_package' .*; is its folder on PYTHONPATH"),
        ("math:sqroot", "has no function 'sqroot'; did you mean 'sqrt'"),
    ],
)
def test_a_wrong_path_is_one_line_at_once(folder, path, message):
    (folder / "broken.py").write_text("def fn(:\n")
    (line,) = refused(lambda: Function(path=path.format(folder=folder)).check_code())
    assert re.search(message.replace("?", r"\?"), line)


STARTS = """
import subprocess, sys
def start(prompt, completion):
    process = subprocess.Popen(["sleep", "300"], start_new_session=completion.text == "session")
    if completion.text == "orphan":
        process.kill()
        process.wait()
        forks = "import os; os.fork() or os.execvp('sleep', ['sleep', '301'])"
        process = subprocess.Popen([sys.executable, "-c", forks])
        process.wait()
    return process.pid
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux only")
@pytest.mark.usefixtures("own_servers")
@pytest.mark.parametrize(
    ("how", "killed"), [("child", False), ("session", False), ("orphan", False), ("session", True), ("orphan", True)]
)
def test_processes_of_a_reward_end_with_the_run_and_the_fork_server(how, killed, tmp_path):
    (tmp_path / "mine.py").write_text(STARTS)
    with runner(Function(path=f"{tmp_path}/mine.py:start")) as made:
        (score,) = ask(made, "42", how)
        (pool,) = made._pools.values()
        above, fork_server, *others = family(pool._server.child.process.pid)
        assert len(others) == 2 and (how == "orphan") == (int(score.value) not in others), score
        if killed:
            os.kill(fork_server, signal.SIGKILL)
            assert_all_end([above, fork_server, *others])
    assert_all_end([above, fork_server, *others])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux only")
def test_the_memory_of_functions_is_limited(tmp_path):
    (tmp_path / "mine.py").write_text("def fill(p, c):\n    return len(bytes(int(c.text) << 20)) >> 20\n")
    for limit, values in ((512, [8, None, 16]), (0, [8, 1024, 16])):
        scores = scored([Function(path=f"{tmp_path}/mine.py:fill")], "42", "8", "1024", "16", memory_mb=limit)
        assert [score.value if score.valid else None for score in scores] == values
        assert scores[1].error == ("fill: MemoryError: above the worker's limit (mine.py:2)" if limit else None)
