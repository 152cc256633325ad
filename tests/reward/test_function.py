"""Your own function, in a worker process: what it may return, and what it may do wrong."""

import asyncio
import textwrap
from pathlib import Path

import pytest

from proxima.reward import Function, Number
from tests.reward.make import completion, completions, prompt, runner

SOURCE = """
import asyncio, os, sys, time
from dataclasses import replace
from proxima.data import Completion, Prompt, Score
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
    return prompt.question == "?" and kinds == (tuple,) * 4 and completion.truncated is False

def counted(prompt, completion):
    CALLS.append(completion.text)
    return len(CALLS)

def wild(prompt, completion):
    text = completion.text
    print("this goes nowhere")
    if text == "raise": raise KeyError("gone")
    if text == "hang": time.sleep(60)
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
    return True
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "my_reward.py").write_text(textwrap.dedent(SOURCE))
    (folder / "neighbour.py").write_text("BONUS = 100\n")
    return folder


def run(folder, functions, *texts, answer="42", timeout=20.0, **metadata):
    rewards = [Function(path=f"{folder}/my_reward.py:{name}") for name in functions]
    with runner(*rewards, timeout=timeout) as made:
        return asyncio.run(made.score(prompt(answer, **metadata), completions(*texts)))


def test_what_a_function_may_return(folder):
    names = ("length", "parts", "score", "awaited", "facts")
    first, second = run(folder, names, "42", "forty-two", bonus=7)
    assert first.error is None
    assert first.parts == {
        "length": 102,
        "parts": 0.5,
        "parts/style": 0.25,
        "parts/n": 0,
        "score": 2.0,
        "score/a": 1.0,
        "awaited": 7.0,
        "facts": 1.0,
    }
    assert first.value == 102 + 0.5 + 2 + 7 + 1 and first.correct is True
    assert second.parts["length"] == 109 and second.correct is False


def test_what_a_function_may_do_wrong_costs_one_completion_each(folder):
    texts = ("fine", "raise", "hang", "spin", "exit", "die", "nan", "text", "none", "dict", "invalid", "correct", "fine")
    scores = run(folder, ["wild"], *texts, timeout=1.0)
    assert [score.valid for score in scores] == [True] + [False] * 11 + [True]
    errors = {text: score.error for text, score in zip(texts, scores, strict=True) if not score.valid}
    assert errors == {
        "raise": "wild: KeyError: 'gone'",
        "hang": "wild: timed out after 1 s",
        "spin": "wild: timed out after 1 s",
        "exit": "wild: SystemExit: 1",
        "die": "wild: its worker ended",
        "nan": "wild: ValueError: returned nan, expected a finite number",
        "text": "wild: ValueError: returned value='good', expected a number",
        "none": "wild: ValueError: returned value=None, expected a number",
        "dict": "wild: ValueError: returned a dict without 'value' (keys: reward)",
        "invalid": "wild: RuntimeError: no opinion",
        "correct": "wild: ValueError: returned correct='yes', expected true, false or nothing",
    }


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="Linux only")
def test_where_memory_runs_out_the_worker_ends_and_not_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("def place(p, c):\n    return float(open('/proc/self/oom_score_adj').read())\n")
    with runner(Function(path=f"{tmp_path}/mine.py:place")) as made:
        (score,) = asyncio.run(made.score(prompt("42"), completions("x")))
    assert score.value == 1000.0


def test_a_module_keeps_its_memory_from_call_to_call(folder):
    assert [score.value for score in run(folder, ["counted"], "a", "b", "c")] == [1, 2, 3]


def test_a_relative_file_is_found_from_where_the_run_began(folder, monkeypatch):
    monkeypatch.chdir(folder)
    reward = Function(path="./my_reward.py:length")
    assert reward.label == "length" and reward.absolute == f"{folder}/my_reward.py:length"
    assert reward.score(prompt(), [completion("abc")])[0].value == 103


def test_a_module_on_the_path(monkeypatch, folder):
    monkeypatch.syspath_prepend(str(folder))
    with runner(Function(path="my_reward:length"), Number(), timeout=20) as made:
        (score,) = asyncio.run(made.score(prompt("42"), completions("42")))
    assert score.parts == {"length": 102.0, "number": 1.0}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_reward.py", "must be 'package.module:function' or './file.py:function'"),
        (":fn", "must be 'package.module:function'"),
        ("{folder}/nope.py:length", "no file '.*nope.py'"),
        ("{folder}/my_reward.py:lenght", "has no function 'lenght'; did you mean 'length'?"),
        ("{folder}/my_reward.py:CALLS", "has no function 'CALLS'"),
        ("{folder}/broken.py:fn", "broken.py' can't be loaded: SyntaxError"),
        ("no_such_package.rewards:fn", "no module 'no_such_package' .*; is its folder on PYTHONPATH"),
        ("math:sqroot", "has no function 'sqroot'; did you mean 'sqrt'"),
    ],
)
def test_a_wrong_path_is_one_line_at_once(folder, path, message):
    (folder / "broken.py").write_text("def fn(:\n")
    with pytest.raises(ValueError, match=message.replace("?", r"\?")) as caught:
        Function(path=path.format(folder=folder))
    assert "\n" not in str(caught.value)
