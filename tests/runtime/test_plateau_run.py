"""Runs that end on a plateau: with RL and on a fixed data set, and resumed."""

import shutil

import pytest

from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.state.folder import RunFolder
from proxima.view.report import write_report
from tests.runtime.tiny_run import assert_same, summary_of, traces

pytestmark = pytest.mark.slow


def test_a_run_ends_on_a_plateau_and_a_resume_may_raise_or_remove_it(runs, tmp_path):
    folder, summary = shutil.copytree(runs.finished("plateau"), tmp_path / "run"), runs.made("plateau").summary
    assert (summary.status, summary.steps) == ("done", 2) and summary.eval["after"]["step"] == 2
    assert summary_of(folder)["plateau"].startswith(
        "plateau: accuracy has not improved by more than 1000 in 2 evaluations, its best is "
    )
    assert "The run ended early: plateau" in write_report(folder).read_text()
    assert runs.go("plateau", folder, resume=True).steps == 2
    assert_same(traces(folder), runs.traces("plateau"))
    assert runs.go("plateau", folder, resume=True, eval__stop_after__patience=4).steps == 4
    whole = runs.go("plateau", folder, resume=True, eval__stop_after=None)
    assert (whole.steps, whole.plateau) == (5, "")


def test_a_metric_without_an_evaluation_ends_the_run_before_step_1(runs, tmp_path):
    said = "eval.stop_after.metric=accurracy: the evaluation has no such metric; it has acc"
    with pytest.raises(RunEnded, match=said):
        runs.go("plateau", tmp_path / "run", eval__stop_after={"patience": 1, "metric": "accurracy"})
    assert not any(record["kind"] == "train" for record in RunFolder(tmp_path / "run").read_metrics())
