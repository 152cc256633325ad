"""A trust region that holds itself, in whole runs: its path is that of the rule, the loss and the page have the bounds
of the step, and a resumed run has them again."""

import pytest

from proxima.core.hold import Hold
from proxima.runtime.state.folder import RunFolder
from proxima.training.checkpoint import checkpoints
from proxima.training.learner import BOUND_FACTOR
from proxima.view.microscope.completion_page import CompletionPage
from proxima.view.microscope.viewed_run import ViewedRun
from tests.runtime.tiny_run import go, recipe, steps_of

pytestmark = pytest.mark.slow


def test_the_factor_follows_what_each_step_masked(runs):
    run = RunFolder(runs.finished("held bounds"))
    hold, factor = Hold(masked=0.05, rate=0.5), 1.0
    for record in steps_of(run.path):
        assert record["hold/factor"] == pytest.approx(factor, rel=1e-12)
        assert record["hold/delta"] == pytest.approx(0.004 * factor)
        assert record["hold/delta_b"] == pytest.approx(0.0005 * factor)
        factor = hold.next(factor, record)
    assert abs(factor - 1) > 0.3
    assert checkpoints(run.checkpoints)[-1].facts[BOUND_FACTOR] == pytest.approx(factor, rel=1e-12)


def test_a_token_is_dropped_by_the_bounds_of_its_step(runs):
    """The page computes them anew from the recipe and the step's factor."""
    run = ViewedRun(0, RunFolder(runs.finished("held bounds")))
    thresholds = set()
    for step in range(2, 5):
        delta = run.metrics_of(step)["hold/delta"]
        largest = 0.0
        for key in run.step(step).rows:
            page = CompletionPage(run, run.step(step), key)
            if "threshold" in page.columns:
                largest = max(largest, float(page.columns["threshold"].max()))
        assert largest == pytest.approx(delta, rel=1e-5)
        thresholds.add(delta)
    assert len(thresholds) == 3


def test_the_drift_of_completions_is_held(tiny_model, tmp_path):
    """Two updates of each step, so that the second has moved."""
    changes = {
        "algorithm": {"preset": "dppo", "hold": {"drift": 1e-3, "rate": 0.3}},
        "train__steps": 3,
        "train__updates_per_step": 2,
    }
    go(tmp_path / "run", recipe(tiny_model("llama"), **changes))
    hold, factor = Hold(drift=1e-3, rate=0.3), 1.0
    for record in steps_of(tmp_path / "run"):
        assert record["hold/factor"] == pytest.approx(factor, rel=1e-12)
        assert record["hold/drift"] > 0
        factor = hold.next(factor, record)
    assert factor != 1
