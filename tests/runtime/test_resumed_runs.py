"""A run that was interrupted and resumed equals one that was not: weights, moments, metrics, samples and journal."""

from itertools import product

import pytest

from tests.runtime.interruptions import interrupt, interrupt_and_resume
from tests.runtime.kill_after import kill_after
from tests.runtime.runs import RUNS
from tests.runtime.tiny_run import assert_same

EVALUATING, EVALUATED_BEFORE, EVALUATED = (
    "while evaluating before",
    "after the evaluation before",
    "after the evaluation at 2",
)
GENERATING, TRAINING, SAVING = "while generating step 2", "while training step 2", "while saving step 2"
STEP_1, STEP_2, STEP_3, STEP_4 = (f"after step {step}" for step in range(1, 5))
BEGUN = [EVALUATING, "while generating step 1", "while training step 1"]
POLICY = [*BEGUN, STEP_1, GENERATING, TRAINING, EVALUATED, STEP_3, STEP_4]
OVER = "after the evaluation at 4"
OFFLINE = [EVALUATING, EVALUATED_BEFORE, "while training step 1", STEP_1, EVALUATED, SAVING, STEP_3, STEP_4, OVER]
BOTH = ("died", "stopped")
PRODUCTS = {  # run: its moments, ends, and intervals of checkpoints
    "policy": (POLICY, BOTH, (0, 1, 2)),
    "critic": ([STEP_1, GENERATING, TRAINING, STEP_3], ("died",), (1, 2)),
    "value head": ([TRAINING, STEP_3], ("died",), (1, 2)),
    "carried groups": ([GENERATING, STEP_2, EVALUATED], BOTH, (1,)),
    "adapter": ([EVALUATING, STEP_3], ("died",), (1, 2)),
    "sft": (OFFLINE, BOTH, (0, 1, 2)),
    "reward model": (OFFLINE, BOTH, (0, 1)),
    "dpo": (OFFLINE, BOTH, (0, 1)),
}
FIXED = [  # on a fixed data set, where a stop ends the step that has begun
    *((EVALUATED_BEFORE, "died", 1), ("while training step 1", "died", 0), (STEP_1, "died", 0)),
    *((EVALUATING, "stopped", 1), (EVALUATED, "died", 0), (SAVING, "died", 1), (STEP_3, "died", 0)),
    *((STEP_4, "stopped", 1), (OVER, "died", 0)),
]
CHAINS = {  # of other runs than those with STANDARD: moment, end and interval of each interruption
    "sft": FIXED,
    "reward model": FIXED,
    "dpo": FIXED,
    "adapter and critic": [(STEP_3, "died", 2)],
    "adapter and value head": [(STEP_3, "died", 2)],
    "sampling masks": [(TRAINING, "stopped", 1)],
    "teacher": [(STEP_2, "stopped", 1)],
    "adaptive KL": [(STEP_2, "stopped", 1)],
    "epochs that stop": [(STEP_2, "stopped", 1)],
    "held-out sets": [(EVALUATING, "stopped", 1), ("while the second set is evaluated at 2", "died", 1)],
    "replay": [(STEP_3, "died", 2)],
    "replay of asynchronous episodes": [(STEP_1, "died", 1)],
    "plateau": [("after the evaluation at 1", "died", 1), (EVALUATED, "died", 1)],
    "plateau of sft": [(EVALUATED, "died", 1)],
    "sft of an adapter": [(EVALUATED, "died", 1), (SAVING, "died", 1), (STEP_3, "stopped", 1)],
    "reward model of an adapter": [(STEP_3, "died", 2)],
    "dpo without a cache": [(STEP_4, "died", 0), (STEP_1, "stopped", 0), (STEP_3, "died", 1)],
    "dpo of an adapter": [(STEP_3, "died", 1)],
    "kto": [(STEP_3, "died", 1)],
    "kto without an anchor": [(STEP_3, "died", 1)],
    "episodes": [(GENERATING, "died", 1)],
}
STANDARD = [(STEP_2, "died", 1)]
FILE = "tests/runtime/test_resumed_runs.py::"
RESUMED = f"{FILE}test_a_resumed_run_equals_an_unbroken_one"


def is_over(moment, end, every):
    """Nothing is left to be stopped."""
    return end == "stopped" and (moment == OVER or (moment == SAVING and every == 0))


def ways(run):
    """The interruptions of a product, by moment."""
    moments, ends, intervals = PRODUCTS[run]
    for moment in moments:
        yield [(moment, end, every) for every, end in product(intervals, ends) if not is_over(moment, end, every)]


def chains():
    """Of a product each moment once, with another end and interval than the moment before."""
    for run in (run for run in RUNS if run != "plain"):
        chain = CHAINS.get(run, STANDARD)
        if run in PRODUCTS and run not in CHAINS:
            chain = [of[number % len(of)] for number, of in enumerate(ways(run))]
        yield pytest.param(run, chain, id=run)


@pytest.mark.parametrize(("run", "interruptions"), chains())
def test_a_resumed_run_equals_an_unbroken_one(run, interruptions, runs, tmp_path, request):
    """Every resume but the last is interrupted as well."""
    if "episodes" in run:
        request.getfixturevalue("mark")
        request.getfixturevalue("warm_processes")
    for number, (moment, end, every) in enumerate(interruptions):
        tree = runs.tree(run, checkpoint__every=every)
        interrupt(RUNS[run].go, tmp_path / "run", tree, moment, end, resume=number > 0)
    assert RUNS[run].go(tmp_path / "run", tree, resume=True).status == "done"
    assert_same(RUNS[run].traces(tmp_path / "run"), runs.traces(run))


@pytest.mark.parametrize(
    ("run", "interruption"),
    [
        pytest.param(run, way, id="-".join(map(str, (run, *way))), marks=pytest.mark.campaign(f"{RESUMED}[{run}]"))
        for run in PRODUCTS
        for of_moment in ways(run)
        for way in of_moment
    ],
)
def test_a_run_that_is_interrupted_once_equals_an_unbroken_one(run, interruption, runs, tmp_path):
    moment, end, every = interruption
    interrupt_and_resume(RUNS[run].go, tmp_path / "run", runs.tree(run, checkpoint__every=every), moment, end)
    assert_same(RUNS[run].traces(tmp_path / "run"), runs.traces(run))


INSTANTS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)  # seconds after the start
KILLED = f"{FILE}test_a_run_that_is_killed_at_any_instant"


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
