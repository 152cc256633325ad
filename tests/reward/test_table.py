"""What holds for every reward of the table; a new one is found there, with its `example_fields`."""

import asyncio
import dataclasses
import math
import subprocess
import sys
from functools import cache

import pytest

from proxima.data.episode import Episode
from proxima.data.flow import Group, Score
from proxima.laws.reward_laws import readable_answer
from proxima.model.load import save
from proxima.model.scalar_model import load_scalar_model
from proxima.reward import REWARDS
from proxima.reward.base import WeightedReward
from tests.documented import assert_documented
from tests.reward.judge_stub import judge
from tests.reward.make import SHORT, completion, completions, prompt, runner, scored
from tests.reward.server import lengths, scorer

pytestmark = pytest.mark.usefixtures("lent_servers")
OUTSIDE = {  # what the tests themselves provide: functions, while they run a server in a thread and a folder, and haste
    "function": {"path": "tests.reward.make:any_text"},
    "function_batch": {"path": "tests.reward.make:every_text"},
    "http": {"url": "http://127.0.0.1:9/"},
    "judge": {"url": "http://127.0.0.1:9/", "model": "m"},
    "model": {"path": "/"},
    "unit_tests": {"seconds": SHORT},  # `9**9**9` takes all of them
}
COMPARING = sorted(kind for kind, reward in REWARDS.items() if reward.needs_answer)
HOSTILE = ["", "\x00" * 50, "9**9**9", "(" * 3000, "\ud800", "1" * 50_000, "<answer>" * 5000, "\\boxed{" * 2000]
HOSTILE += ["</think>\n<answer>" * 2000, "####" * 5000]


@pytest.fixture(scope="module", autouse=True)
def server(tiny_model, tmp_path_factory):
    loaded = load_scalar_model(str(tiny_model("llama")), device="cpu", new_head=0.0)
    OUTSIDE["model"]["path"] = str(save(loaded.model, loaded.tokenizer, tmp_path_factory.mktemp("scores-0")))
    with scorer(lengths) as made, judge() as judging:
        OUTSIDE["http"]["url"] = made.url
        OUTSIDE["judge"]["url"] = judging.url
        yield


def make(kind, **fields):
    return REWARDS[kind](**REWARDS[kind].example_fields, **OUTSIDE.get(kind, {}), **fields)


@pytest.mark.parametrize("kind", sorted(REWARDS))
def test_is_a_documented_spec(kind):
    assert_documented(REWARDS[kind])
    assert issubclass(REWARDS[kind], WeightedReward) and REWARDS[kind].kind == kind


@pytest.mark.parametrize("kind", sorted(REWARDS))
def test_weight_and_name(kind):
    reward = make(kind, weight=0.5, name="other")
    assert (reward.weight, reward.label) == (0.5, "other")
    assert make(kind).weight == 1.0
    assert make(kind).label == {"function": "any_text", "function_batch": "every_text"}.get(kind, kind)
    assert make(kind) == make(kind) and hash(make(kind)) == hash(make(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(REWARDS))
def test_hostile_text_gets_an_answer_in_its_place(kind):
    scores = _scores(kind)[:-2]
    assert len(scores) == len(HOSTILE) + 2 and all(isinstance(score, Score) for score in scores)
    assert all(score.valid or score.error for score in scores)
    assert scores[0].valid and scores[-1].valid and scores[0].correct == scores[-1].correct
    assert all(score.correct is not True for score in scores[1:-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(REWARDS))
def test_an_empty_completion_gets_a_sensible_verdict(kind):
    other, *_, first, second = _scores(kind)
    assert (first.valid, first.value) == (True, 0.0) and first == second
    assert first.correct is (None if other.correct is None else False)  # wrong where the reward tells at all
    assert first.correct is False or not REWARDS[kind].needs_answer
    assert all(math.copysign(1.0, value) == 1.0 for value in first.parts.values())  # no -0.0 in the logs


@cache
def _scores(kind):
    """Scores as a run makes them, of the group, then of the batch: of hostile texts between two ordinary ones, then of
    two empty completions."""
    several = completions("first 42", *HOSTILE, "last 42")
    several += [completion("", tokens=0, sample=len(several) + i) for i in range(2)]
    if kind == "environment":
        several = [dataclasses.replace(each, episode=Episode(reward=0.0)) for each in several]
    row = prompt(readable_answer(make(kind)) if kind in COMPARING else "42")
    if kind == "reasoning_gym":
        from proxima.task.reasoning_gym import ReasoningGymTask

        row = dataclasses.replace(row, metadata=ReasoningGymTask(task="basic_arithmetic", size=1).rows(1)[0].metadata)

    async def both(made):
        scores = await made.score(row, several)
        (group,) = await made.score_batch([Group(prompt=row, completions=several, scores=tuple(scores))])
        return list(group.scores)

    with runner(make(kind)) as made:
        return asyncio.run(both(made))


IMPORTS = """
import sys, threading, proxima.reward, proxima.reward.workers.user_function
print("torch" in sys.modules)
import proxima.task
print(sorted({"sympy", "math_verify", "reasoning_gym", "datasets", "pyarrow", "transformers"} & set(sys.modules)))
print(threading.active_count())
"""


@pytest.mark.slow
def test_importing_the_room_loads_no_algebra_and_starts_nothing():
    """Nor torch: a restricted worker, which imports the room too, may load no shared library."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["False", "[]", "1", ""]


@pytest.mark.parametrize("kind", COMPARING)
def test_a_row_without_an_answer_is_invalid_never_zero(kind):
    (score,) = scored([make(kind)], None, "42")
    assert not score.valid and f"'{kind}' compares with an answer" in score.error
