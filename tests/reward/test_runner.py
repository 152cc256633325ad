"""Weights, parts, names, failures; and rewards of somebody else's that run in threads."""

import asyncio
import importlib.util
import subprocess
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from proxima.data.flow import Score
from proxima.reward import calls
from proxima.reward.base import WeightedReward
from proxima.reward.calls import ThreadCalls
from proxima.reward.function import Function
from proxima.reward.length import Length
from proxima.reward.math.marked import Gsm8kReward
from proxima.reward.math.numbers import Number
from proxima.reward.math.symbolic import Math
from proxima.reward.reasoning_gym import ReasoningGymReward
from proxima.reward.runner import RewardRunner
from proxima.reward.text import Exact, Format
from tests.refusals import refused
from tests.reward.make import LONG, SHORT, ask, completion, prompt, runner, scored

pytestmark = pytest.mark.usefixtures("lent_servers")
THOUGHT = "<think>17 + 25 is 42</think>\n<answer>42</answer>"


def test_values_are_weighted_and_parts_are_not():
    right, wrong = scored([Number(weight=2.0), Format(weight=-0.5, name="shape")], "42", THOUGHT, "It is 41.")
    assert (right.value, right.parts, right.correct, right.valid) == (1.5, {"number": 1.0, "shape": 1.0}, True, True)
    assert (wrong.value, wrong.parts, wrong.correct, wrong.valid) == (0.0, {"number": 0.0, "shape": 0.0}, False, True)


def test_correct_comes_from_the_first_reward_that_knows():
    for rewards, correct in (((Exact(), Number()), False), ((Number(), Exact()), True), ((), None)):
        (score,) = scored([Length(), *rewards], "42", "It is 42")
        assert score.correct is correct


def test_a_failure_names_the_reward_and_keeps_the_other_parts():
    (score,) = scored([Number(), Length(), Gsm8kReward(name="again")], "many", "It is 42")
    assert not score.valid and score.value != score.value
    assert score.parts == {"length": 0.0}
    first = "number: ValueError: answer 'many' of prompt 7 is not a number; use 'exact' or 'math'"
    assert score.error.startswith(f"{first}; again: ValueError")


def test_a_reward_of_weight_zero_only_logs():
    (score,) = scored([Length(), Number(weight=0.0)], "many", "It is 42")
    assert score.valid and score.value == 0.0 and score.parts == {"length": 0.0}
    (score,) = scored([Exact(), Number(weight=0.0)], "42", "It is 42")
    assert score.value == 0.0 and score.parts == {"exact": 0.0, "number": 1.0}


@pytest.mark.parametrize(
    ("reward", "package", "extra"),
    [(Math(), "math-verify", "math"), (ReasoningGymReward(name="puzzle"), "reasoning-gym", "gym")],
)
def test_a_missing_package_is_said_once(reward, package, extra, monkeypatch):
    find = importlib.util.find_spec
    hidden = package.replace("-", "_")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == hidden else find(name, *more))
    said = f"reward '{reward.label}': it needs the package {package}: pip install 'proxima-rl[{extra}]'"
    assert refused(RewardRunner([reward]).check) == [said]


def test_names_must_differ_and_there_must_be_a_reward():
    twice = "reward='number' is the name of two rewards; give one of them another `name`"
    assert refused(RewardRunner, [Number(), Number()]) == [twice]
    assert refused(RewardRunner, []) == ["reward=[] must hold at least one reward"]
    kind = "reward dict is not a subclass of proxima.reward.base.WeightedReward"
    assert refused(RewardRunner, [{"kind": "number"}]) == [kind]
    assert RewardRunner([Number(), Number(name="second")]).labels == ("number", "second")
    for field in ("timeout", "workers"):
        assert refused(RewardRunner, [Number()], **{field: 0})[0].startswith(f"{field}=0 must be >")


def test_no_completions_no_scores():
    assert scored([Number(), Format()], "42") == []


@dataclass(frozen=True, kw_only=True)
class Plain(WeightedReward):
    """Somebody else's reward."""

    def score(self, prompt, completions):
        return [Score(value=self.value_of(c.text), correct=c.text == prompt.answer) for c in completions]

    def value_of(self, text):
        if text == "hang":
            GATE.wait()
        if text == "raise":
            raise LookupError("two\nlines")
        if text == "exit":
            raise SystemExit(3)
        return float(text)


GATE = threading.Event()


@dataclass(frozen=True, kw_only=True)
class Best(WeightedReward):
    """Looks at the whole group: 1 to the longest."""

    whole_group = True

    def score(self, prompt, completions):
        if any(c.text == "raise" for c in completions):
            raise RuntimeError("no winner")
        longest = max(len(c.text) for c in completions)
        return [Score(value=float(len(c.text) == longest)) for c in completions]


class Hurried(ThreadCalls):
    """Gives calls that hang a short limit."""

    async def _run(self, function, timeout):
        hangs = function.args[2][0].text == "hang"
        return await super()._run(function, SHORT if hangs else timeout)


@pytest.mark.slow
def test_a_reward_that_hangs_in_a_thread_costs_one_completion(monkeypatch):
    monkeypatch.setattr("proxima.reward.runner.ThreadCalls", Hurried)
    wrong = {"hang": f"timed out after {SHORT:g} s", "raise": "LookupError: two lines", "exit": "SystemExit: 3"}
    wrong["nan"] = "ValueError: returned nan, expected a finite number"
    made = RewardRunner([Plain()], timeout=LONG)
    scores = ask(made, "3", "1", *wrong, "3", "hang", "4")
    GATE.set()
    made.close()
    assert [score.value for score in scores if score.valid] == [1.0, 3.0, 4.0]
    errors = [f"plain: {error}" for error in wrong.values()]
    assert [score.error for score in scores] == [None, *errors, None, errors[0], None]
    assert [score.correct for score in scores] == [False, *[None] * 4, True, None, False]


class Careless(WeightedReward):
    """Returns what its answer names."""

    def score(self, prompt, completions):
        if prompt.answer == "cancelled":
            raise asyncio.CancelledError
        some = {
            "nothing": None,
            "too few": [],
            "one": Score(value=1.0),
            "number": [1.0],
            "text part": [Score(value=1.0, parts={"note": "good"})],
            "no parts": [Score(value=1.0, parts=None)],
            "generator": (Score(value=1.0) for _ in completions),
            "int": [Score(value=1, correct=1, parts={"n": True})],
            "numpy": [Score(value=np.float32(1), correct=np.bool_(True), parts={"n": np.int64(1)})],
        }
        return some[prompt.answer]


@pytest.mark.parametrize("answer", ["nothing", "too few", "one", "number", "text part", "no parts", "cancelled"])
def test_what_is_no_score_costs_its_completion(answer):
    (score,) = scored([Careless()], answer, "x")
    told = "ValueError: returned 0 scores for 1 completions" if answer == "too few" else ""
    assert not score.valid and score.error.startswith(f"careless: {told}")


@pytest.mark.parametrize("answer", ["generator", "int", "numpy"])
def test_scores_are_in_pythons_own_numbers(answer):
    (score,) = scored([Careless()], answer, "x")
    assert score.valid and score.correct in (None, True) and type(score.correct) is not int
    assert all(type(value) is float for value in (score.value, *score.parts.values()))


def test_an_error_is_fit_to_be_printed():
    class Quotes(WeightedReward):
        def score(self, prompt, completions):
            raise ValueError(f"can't read {completions[0].text}")

    (score,) = scored([Quotes()], None, "\ud83d \x1b[2J\x07 é")
    assert score.error == "quotes: ValueError: can't read \ufffd \ufffd[2J\ufffd é"


def test_a_sum_that_is_not_finite_is_no_score():
    (score,) = scored([Number(weight=1e308), Number(name="second", weight=1e308)], "42", "42")
    assert score.error == "the weighted sum of the rewards is inf, expected a number within ±1e+12"
    assert not score.valid and score.parts == {"number": 1.0, "second": 1.0}


def test_a_reward_of_the_whole_group_sees_it_and_fails_as_one():
    assert [score.value for score in scored([Best()], None, "a", "abc", "ab")] == [0.0, 1.0, 0.0]
    scores = scored([Best(name="best"), Length()], None, "a", "raise")
    assert [score.error for score in scores] == ["best: RuntimeError: no winner"] * 2
    assert [score.parts for score in scores] == [{"length": 0.0}] * 2


def test_the_same_text_is_judged_once_a_group_and_a_function_each_time(tmp_path):
    (tmp_path / "mine.py").write_text("CALLS = []\ndef count(p, c):\n    CALLS.append(c)\n    return len(CALLS)\n")
    with runner(Format(), Function(path=f"{tmp_path}/mine.py:count")) as made:
        pool, jobs = made._pools["text"], []
        submit = pool._submit
        pool._submit = lambda asked: (jobs.extend(asked), submit(asked))[1]
        scores = ask(made, "42", THOUGHT, "41", THOUGHT, "41", "40")
    assert [job.arguments["text"] for job in jobs] == [THOUGHT, "41", "40"]
    assert [score.parts for score in scores] == [{"format": float(i in (0, 2)), "count": i + 1.0} for i in range(5)]


HANGING = """
import asyncio, threading
from proxima.reward.base import WeightedReward
from proxima.reward.runner import RewardRunner
from proxima.data.flow import Score
from tests.reward.make import prompt, completion
class Hangs(WeightedReward):
    def score(self, prompt, completions):
        threading.Event().wait()
made = RewardRunner([Hangs()], timeout=0.2)
print(asyncio.run(made.score(prompt(), [completion("x")]))[0].error)
made.close()
"""


@pytest.mark.slow
def test_a_hung_thread_does_not_keep_the_process_alive():
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "hangs: timed out after 0.2 s"), done.stderr


def test_a_thread_that_cannot_be_started_costs_its_completion(monkeypatch):
    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(calls.threading, "Thread", NoThread)
    (score,) = scored([Plain()], None, "1")
    assert score.error == "plain: can't start new thread"


@pytest.fixture
def held():
    """A reward that waits for `gate`, and what it was called with."""
    gate, entered = threading.Event(), []

    class Hangs(WeightedReward):
        def score(self, prompt, completions):
            entered.append(completions)
            gate.wait()
            return [Score(value=float(c.sample)) for c in completions]

    return Hangs(), gate, entered


@pytest.mark.slow
def test_a_large_group_opens_no_more_threads_than_workers(held):
    reward, gate, entered = held

    async def scored_group(made):
        before = set(threading.enumerate())
        scoring = asyncio.ensure_future(made.score(prompt(), [completion("x", sample=i) for i in range(200)]))
        while len(entered) < 3:
            await asyncio.sleep(0.001)
        started = set(threading.enumerate()) - before
        gate.set()
        return len(started), [score.value for score in await scoring]

    with runner(reward, workers=3) as made:
        assert asyncio.run(scored_group(made)) == (3, [float(i) for i in range(200)])


@pytest.mark.slow
def test_a_scorer_that_always_hangs_does_not_take_all_threads(held):
    reward, gate, _ = held
    before = set(threading.enumerate())
    made = RewardRunner([reward], timeout=0.005, workers=8)
    scores = asyncio.run(made.score(prompt(), [completion("x", sample=i) for i in range(1000)]))
    hanging = set(threading.enumerate()) - before
    errors, late = [score.error for score in scores], "hangs: timed out after 0.005 s"
    assert len(hanging) <= 108 and not any(score.valid for score in scores) and errors.count(late) <= 108
    assert {*errors} - {late} <= {f"hangs: not called: {n} earlier calls still hang" for n in range(100, 109)}
    gate.set()
    for thread in hanging:
        thread.join(LONG)
    (calls,) = made._calls
    calls.timeout = LONG
    (again,) = asyncio.run(made.score(prompt(), [completion("x", sample=1)]))
    made.close()
    assert again.value == 1.0
