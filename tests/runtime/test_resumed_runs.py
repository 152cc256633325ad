"""A run that was interrupted and resumed equals one that was not: weights, moments, metrics, samples and journal."""

import pytest

from tests.campaigns import campaign
from tests.runtime.interruptions import interrupt, kill_after
from tests.runtime.runs import RUNS
from tests.runtime.tiny_run import assert_same, go

pytestmark = pytest.mark.slow

EVALUATING, EVALUATED_BEFORE, EVALUATED = (
    "while evaluating before",
    "after the evaluation before",
    "after the evaluation at 2",
)
GENERATING, TRAINING, SAVING = "while generating step 2", "while training step 2", "while saving step 2"
STEP_1, STEP_2, STEP_3, STEP_4 = (f"after step {step}" for step in range(1, 5))
OVER = "after the evaluation at 4"
FIXED = [  # on a fixed data set, where a stop ends the step that has begun
    *((EVALUATED_BEFORE, "died", 1), ("while training step 1", "died", 0), (STEP_1, "died", 0)),
    *((EVALUATING, "stopped", 1), (EVALUATED, "died", 0), (SAVING, "died", 1), (STEP_3, "died", 0)),
    *((STEP_4, "stopped", 1), (OVER, "died", 0)),
]
CHAINS = {  # of other runs than those with STANDARD: moment, end and interval of checkpoints of each interruption
    "policy": [
        *((EVALUATING, "died", 0), ("while generating step 1", "stopped", 0), ("while training step 1", "died", 1)),
        *((STEP_1, "stopped", 1), (GENERATING, "died", 2), (TRAINING, "stopped", 2), (EVALUATED, "died", 0)),
        *((STEP_3, "stopped", 0), (STEP_4, "died", 1)),
    ],
    "critic": [(STEP_1, "died", 1), (TRAINING, "died", 1), (STEP_3, "died", 2)],
    "value head": [(TRAINING, "died", 1), (STEP_3, "died", 2)],
    "carried groups": [(GENERATING, "died", 1), (STEP_2, "stopped", 1), (EVALUATED, "died", 1)],
    "adapter": [(EVALUATING, "died", 1), (STEP_3, "died", 2)],
    "sft": FIXED,
    "reward model": FIXED,
    "dpo": [("while training step 1", "died", 0), (SAVING, "died", 1), (STEP_3, "died", 0)],
    "adapter and critic": [(STEP_3, "died", 2)],
    "adapter and value head": [(STEP_3, "died", 2)],
    "sampling masks": [(TRAINING, "stopped", 1)],
    "teacher": [(STEP_2, "stopped", 1)],
    "stopped completions": [(GENERATING, "died", 1), (STEP_3, "died", 2)],
    "held bounds": [(TRAINING, "died", 1), (STEP_3, "stopped", 1)],
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
    "episodes of roles": [(STEP_1, "stopped", 1), (TRAINING, "died", 1)],
}
STANDARD = [(STEP_2, "died", 1)]
ALIKE = {  # a run → those that write and read nothing that it does not
    "policy": ("images", "scored by a model", "online pairs", "teacher", "epochs that stop", "an engine that rounds"),
    "sampling masks": ("routed experts", "likeliest tokens and greedy baselines"),
    "critic": ("value head",),
    "adapter": ("adapter and critic", "adapter and value head", "sft of an adapter", "dpo of an adapter"),
    "sft": ("reward model", "reward model of an adapter"),
    "dpo": ("dpo without a cache", "kto", "kto without an anchor"),
    "plateau": ("plateau of sft",),
    "replay": ("replay of asynchronous episodes",),
    "episodes": ("episodes of an agent", "episodes of an agent that pays turns", "episodes with echo"),
}
RESUMED = "tests/runtime/test_resumed_runs.py::test_a_resumed_run_equals_an_unbroken_one"


def small_and_campaigns():
    others = {run for alike in ALIKE.values() for run in alike}
    yield from (run for run in RUNS if run != "plain" and run not in others)
    for small, alike in ALIKE.items():
        yield from campaign(f"{RESUMED}[{small}]", alike)


@pytest.mark.parametrize("run", small_and_campaigns())
def test_a_resumed_run_equals_an_unbroken_one(run, runs, tmp_path, request):
    """Every resume but the last is interrupted as well."""
    if "episodes" in run:
        request.getfixturevalue("mark")
        request.getfixturevalue("warm_processes")
    for number, (moment, end, every) in enumerate(CHAINS.get(run, STANDARD)):
        tree = runs.tree(run, checkpoint__every=every)
        interrupt(go, tmp_path / "run", tree, moment, end, resume=number > 0)
    assert go(tmp_path / "run", tree, resume=True).status == "done"
    assert_same(RUNS[run].traces(tmp_path / "run"), runs.traces(run))


KILLED = "tests/runtime/test_resumed_runs.py::test_a_run_that_is_killed_at_any_instant"
INSTANTS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)  # seconds after the start


def kills():
    for run in ("sft", "dpo"):
        yield run, 0.01, "step"
        yield from campaign(f"{KILLED}[{run}-0.01-step]", [(run, seconds, "started") for seconds in INSTANTS])


@pytest.mark.parametrize(("run", "seconds", "start"), kills())
def test_a_run_that_is_killed_at_any_instant(run, seconds, start, runs, tmp_path):
    """Of its first step, or of what comes before: also while the log-probs of a reference are computed or written."""
    own = {"preference__cache": str(tmp_path / "cache")} if run == "dpo" else {}
    tree = runs.tree(run, **own)
    kill_after(seconds, tmp_path / "run", tree, start=start)
    assert go(tmp_path / "run", tree, resume=True).status == "done"
    assert_same(RUNS[run].traces(tmp_path / "run"), runs.traces(run))
