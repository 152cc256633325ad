"""What holds for every reward of the table."""

import asyncio
import dataclasses
import inspect
import math
import subprocess
import sys

import pytest

from proxima.data import Group, Score
from proxima.model import load_scalar_model, save
from proxima.reward import REWARDS, WeightedReward
from tests.reward.make import completion, completions, prompt, runner, scored
from tests.reward.server import lengths, scorer

MADE = {
    "function": {"path": "tests.reward.test_table:any_text"},
    "function_batch": {"path": "tests.reward.test_table:every_text"},
    "http": {"url": "http://127.0.0.1:9/"},  # while the tests run: a server in a thread
    "model": {"path": "/"},  # while the tests run: a folder
    "overlong": {"max_tokens": 8, "buffer_tokens": 4},
    "unit_tests": {"seconds": 1.0},  # `9**9**9` takes all of them
}
ANSWERED = ("accuracy_1_5_2", "number", "exact", "gsm8k", "boxed", "regex", "math", "unit_tests")
HOSTILE = [
    "",
    "\x00" * 50,
    "9**9**9",
    "(" * 3000,
    "\ud800",
    "1" * 50_000,
    "<answer>" * 5000,
    "</think>\n<answer>" * 2000,
    "\\boxed{" * 2000,
    "####" * 5000,
]


def any_text(prompt, completion):
    return float(len(completion.text))


@pytest.fixture(scope="module", autouse=True)
def server(tiny_model, tmp_path_factory):
    found = load_scalar_model(str(tiny_model("llama")), device="cpu", new_head=0.0)
    MADE["model"]["path"] = str(save(found.model, found.tokenizer, tmp_path_factory.mktemp("scores-0")))
    with scorer(lengths) as made:
        MADE["http"]["url"] = made.url
        yield


def every_text(groups):
    return [[float(len(completion.text)) for completion in group.completions] for group in groups]


def make(kind, **fields):
    return REWARDS[kind](**MADE.get(kind, {}), **fields)


@pytest.mark.parametrize("kind", sorted(REWARDS))
def test_is_a_documented_spec(kind):
    cls = REWARDS[kind]
    assert issubclass(cls, WeightedReward) and dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
    assert cls.kind == kind
    doc = inspect.cleandoc(cls.__dict__["__doc__"])
    first, blank, *_ = [*doc.splitlines(), ""]
    assert first.endswith(".") and (blank == "" or blank.startswith("Args:")), first
    docs = [
        inspect.cleandoc(base.__dict__.get("__doc__") or "") for base in cls.__mro__
    ]  # a base documents its own fields
    arguments = "\n".join(text.partition("Args:\n")[2].partition("\nReturns:")[0] for text in docs)
    for field in dataclasses.fields(cls):
        assert f"\n    {field.name}: " in f"\n{arguments}", f"{kind}.{field.name} is not documented"


@pytest.mark.parametrize("kind", sorted(REWARDS))
def test_weight_and_name(kind):
    reward = make(kind, weight=0.5, name="other")
    assert (reward.weight, reward.label) == (0.5, "other")
    assert make(kind).weight == 1.0
    assert make(kind).label == {"function": "any_text", "function_batch": "every_text"}.get(kind, kind)
    assert make(kind) == make(kind) and hash(make(kind)) == hash(make(kind))


@pytest.mark.parametrize("kind", sorted(REWARDS))
def test_hostile_text_gets_an_answer_in_its_place(kind):
    scores = _scores(kind, *completions("first 42", *HOSTILE, "last 42"))
    assert len(scores) == len(HOSTILE) + 2 and all(isinstance(score, Score) for score in scores)
    assert all(score.valid or score.error for score in scores)
    assert scores[0].valid and scores[-1].valid and scores[0].correct == scores[-1].correct
    assert all(score.correct is not True for score in scores[1:-1])


EMPTY = {  # value and verdict of a completion without a token
    "accuracy_1_5_2": (0.0, False),
    "boxed": (0.0, False),
    "diversity": (0.0, None),
    "exact": (0.0, False),
    "format": (0.0, None),
    "function": (0.0, None),
    "function_batch": (0.0, None),
    "gsm8k": (0.0, False),
    "http": (0.0, None),
    "length": (0.0, None),
    "math": (0.0, False),
    "missing_eos": (0.0, None),
    "model": (0.0, None),
    "number": (0.0, False),
    "overlong": (0.0, None),
    "reasoning_gym": (0.0, False),
    "regex": (0.0, False),
    "repetition": (0.0, None),
    "unit_tests": (0.0, False),
}


@pytest.mark.parametrize("kind", sorted(REWARDS))
def test_an_empty_completion_gets_a_sensible_verdict(kind):
    empty = completion("", tokens=0)
    one, two = _scores(kind, empty, dataclasses.replace(empty, sample=1))
    assert (one.valid, one.value, one.correct) == (True, *EMPTY[kind]) and one == two
    assert all(math.copysign(1.0, value) == 1.0 for value in one.parts.values())  # no -0.0 in the logs


def _scores(kind, *several):
    """Scores as a run makes them: of the group, then of the batch."""
    row = prompt(["assert answer() == 42"] if kind == "unit_tests" else "42")
    if kind == "reasoning_gym":
        from proxima.task import ReasoningGymTask

        row = dataclasses.replace(row, metadata=ReasoningGymTask(task="basic_arithmetic", size=1).rows(1)[0].metadata)

    async def both(made):
        scores = await made.score(row, several)
        (group,) = await made.score_batch([Group(prompt=row, completions=several, scores=tuple(scores))])
        return list(group.scores)

    with runner(make(kind), timeout=20) as made:
        return asyncio.run(both(made))


def test_importing_the_room_loads_no_algebra_and_starts_nothing():
    code = (
        "import sys, threading, proxima.reward, proxima.task;"
        "loaded = {'sympy', 'math_verify', 'reasoning_gym', 'datasets', 'pyarrow', 'transformers'} & set(sys.modules);"
        "print(sorted(loaded), threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] 1"


def test_a_worker_may_import_the_room_without_torch():
    """A restricted worker may load no shared library."""
    code = "import sys, proxima.reward, proxima.reward.workers.user_function; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("kind", ANSWERED)
def test_a_row_without_an_answer_is_invalid_never_zero(kind):
    (score,) = scored([make(kind)], None, "42")
    assert not score.valid and f"'{kind}' compares with an answer" in score.error
