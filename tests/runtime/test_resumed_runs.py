"""A run that was interrupted and resumed equals one that was not: weights, moments, metrics, samples and journal."""

from itertools import product

import pytest

from tests.runtime.interruptions import interrupt_and_resume
from tests.runtime.kill_after import kill_after
from tests.runtime.runs import RUNS
from tests.runtime.tiny_run import assert_same

EVALUATING, EVALUATED_BEFORE, EVALUATED = (
    "while evaluating before",
    "after the evaluation before",
    "after the evaluation at 2",
)
GENERATING, TRAINING = "while generating step 2", "while training step 2"
STEP_1, STEP_2, STEP_3, STEP_4 = (f"after step {step}" for step in range(1, 5))
POLICY = [
    "while generating step 1",
    "while training step 1",
    GENERATING,
    TRAINING,
    STEP_1,
    STEP_3,
    EVALUATING,
    EVALUATED,
    STEP_4,
]
OFFLINE = [
    "while training step 1",
    EVALUATING,
    EVALUATED_BEFORE,
    STEP_1,
    STEP_3,
    EVALUATED,
    "while saving step 2",
    STEP_4,
    "after the evaluation at 4",
]
BOTH = ("died", "stopped")
PRODUCTS = {  # run: its moments, ends, and intervals of checkpoints
    "policy": (POLICY, BOTH, (0, 1, 2)),
    "critic": ([GENERATING, TRAINING, STEP_1, STEP_3], ("died",), (1, 2)),
    "value head": ([TRAINING, STEP_3], ("died",), (1, 2)),
    "carried groups": ([GENERATING, STEP_2, EVALUATED], BOTH, (1,)),
    "adapter": ([STEP_3, EVALUATING], ("died",), (1, 2)),
    "sft": (OFFLINE, BOTH, (0, 1, 2)),
    "reward model": (OFFLINE, BOTH, (0, 1)),
    "dpo": (OFFLINE, BOTH, (0, 1)),
}
SINGLE = {
    "adapter and critic": [(STEP_3, "died", 2)],
    "adapter and value head": [(STEP_3, "died", 2)],
    "sampling masks": [(TRAINING, "stopped", 1)],
    "routed experts": [(STEP_2, "died", 1)],
    "likeliest tokens and greedy baselines": [(STEP_2, "died", 1)],
    "teacher": [(STEP_2, "stopped", 1)],
    "adaptive KL": [(STEP_2, "stopped", 1)],
    "epochs that stop": [(STEP_2, "stopped", 1)],
    "online pairs": [(STEP_2, "died", 1)],
    "held-out sets": [("while the second set is evaluated at 2", "died", 1)],
    "mix of tasks": [(STEP_2, "died", 1)],
    "scored by a model": [(STEP_2, "died", 1)],
    "replay": [(STEP_3, "died", 2)],
    "plateau": [("after the evaluation at 1", "died", 1), (EVALUATED, "died", 1)],
    "plateau of sft": [(EVALUATED, "died", 1)],
    "sft of an adapter": [(STEP_3, "died", 1), (EVALUATED, "died", 1), ("while saving step 2", "died", 1)],
    "reward model of an adapter": [(STEP_3, "died", 2)],
    "dpo without a cache": [(STEP_1, "stopped", 0), (STEP_3, "stopped", 1), (STEP_4, "died", 0)],
    "dpo of an adapter": [(STEP_3, "died", 1)],
    "kto": [(STEP_3, "died", 1)],
    "kto without an anchor": [(STEP_3, "died", 1)],
    "episodes": [(GENERATING, "died", 1)],
    "episodes, pruned": [(STEP_2, "died", 1)],
    "episodes of an agent": [(STEP_2, "died", 1)],
}
BROAD = {  # as another case, with other settings that no resume reads
    "episodes of an engine's process": (STEP_2, "died", 1),
    "episodes, returns of turns": (STEP_2, "died", 1),
    "episodes, states in common": (STEP_2, "died", 1),
    "episodes with a value head": (STEP_2, "died", 1),
}
OVER = {  # nothing is left to be stopped
    *(("after the evaluation at 4", every, "stopped") for every in (0, 1, 2)),
    ("while saving step 2", 0, "stopped"),
}
TEST = "tests/runtime/test_resumed_runs.py::test_a_resumed_run_equals_an_unbroken_one"


def cases():
    """Of a product each moment once, with another end and interval than the moment before; the others are campaigns."""
    for run, (moments, ends, intervals) in PRODUCTS.items():
        for number, moment in enumerate(moments):
            ways = [way for way in product(intervals, ends) if (moment, *way) not in OVER]
            ways = [ways[(number + shift) % len(ways)] for shift in range(len(ways))]
            sibling = "-".join((run, moment, ways[0][1], str(ways[0][0])))
            for way, (every, end) in enumerate(ways):
                marks = [pytest.mark.campaign(f"{TEST}[{sibling}]")] * (way > 0)
                yield pytest.param(run, moment, end, every, marks=marks)
    for run, interruptions in SINGLE.items():
        yield from (pytest.param(run, *interruption) for interruption in interruptions)
    episodes = pytest.mark.campaign(f"{TEST}[episodes-{GENERATING}-died-1]")
    yield from (pytest.param(run, *interruption, marks=episodes) for run, interruption in BROAD.items())


@pytest.mark.parametrize(("run", "moment", "end", "every"), cases())
def test_a_resumed_run_equals_an_unbroken_one(run, moment, end, every, runs, tmp_path, request):
    if run.startswith("episodes"):
        request.getfixturevalue("mark")
        request.getfixturevalue("warm_processes")
    unbroken = runs.traces(run)
    tree = runs.tree(run, checkpoint__every=every)
    interrupt_and_resume(RUNS[run].go, tmp_path / "run", tree, moment, end)
    assert_same(RUNS[run].traces(tmp_path / "run"), unbroken)


INSTANTS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)  # seconds after the start
KILLED = "tests/runtime/test_resumed_runs.py::test_a_run_that_is_killed_at_any_instant"


def kills():
    for run in ("sft", "reward model", "dpo", "teacher"):
        small = run in ("sft", "dpo")
        if small:
            yield pytest.param(run, 0.01, "step")
        mark = pytest.mark.campaign(f"{KILLED}[{run if small else 'sft'}-0.01-step]")
        for seconds in INSTANTS:
            yield pytest.param(run, seconds, "step" if run == "teacher" else "started", marks=mark)


@pytest.mark.parametrize(("run", "seconds", "start"), kills())
def test_a_run_that_is_killed_at_any_instant(run, seconds, start, runs, tmp_path):
    """Of its first step, or of what comes before: also while the log-probs of a reference are computed or written."""
    own = {"preference__cache": str(tmp_path / "cache")} if run == "dpo" else {}
    tree = runs.tree(run, **own)
    kill_after(seconds, tmp_path / "run", tree, module=RUNS[run].go.__module__, start=start)
    assert RUNS[run].go(tmp_path / "run", tree, resume=True).status == "done"
    assert_same(RUNS[run].traces(tmp_path / "run"), runs.traces(run))


def test_all_of_them_are_interrupted():
    assert {*PRODUCTS, *SINGLE, *BROAD} == RUNS.keys() - {"plain"}
