"""Runs that end on a plateau: with RL and on a fixed data set, and resumed."""

import pytest

from proxima.config.problems import ConfigError
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.state.folder import RunFolder
from proxima.view.report import write_report
from tests.runtime.offline import tiny_sft
from tests.runtime.tiny_run import Watcher, assert_same, go, recipe, summary_of, traces

NEVER = {"patience": 2, "min_delta": 1e3}  # no evaluation is an improvement


class Died(BaseException):
    pass


def die_after_evaluation(step):
    def on(event, *facts):
        if event == "evaluated" and facts[0]["step"] == step:
            raise Died

    return Watcher(on)


def tree(kind, tiny_model, folder, **changes):
    made = {"eval__every": 1, "train__steps": 5, "train__schedule": "constant", "eval__stop_after": NEVER, **changes}
    if kind == "sft":
        return tiny_sft.recipe(tiny_model("llama"), folder / "rows", eval__samples=0, **made)
    return recipe(tiny_model("llama"), train__completions_per_prompt=2, **made)


@pytest.mark.parametrize(("kind", "start"), [("train", go), ("sft", tiny_sft.go)])
def test_a_run_ends_on_a_plateau_and_a_resumed_one_at_the_same_step(kind, start, tiny_model, tmp_path):
    config = tree(kind, tiny_model, tmp_path)
    summary = start(tmp_path / "run", config)
    figure = "loss" if kind == "sft" else "accuracy"
    assert (summary.status, summary.steps) == ("done", 2) and summary.eval["after"]["step"] == 2
    assert summary_of(tmp_path / "run")["plateau"].startswith(
        f"plateau: {figure} has not improved by more than 1000 in 2 evaluations, its best is "
    )
    assert "The run ended early: plateau" in write_report(tmp_path / "run").read_text()
    unbroken = traces(tmp_path / "run")
    for step in (1, 2):
        with pytest.raises(Died):
            start(tmp_path / f"broken{step}", config, observer=die_after_evaluation(step))
        start(tmp_path / f"broken{step}", config, resume=True)
        assert_same(traces(tmp_path / f"broken{step}"), unbroken)
    assert start(tmp_path / "run", config, resume=True).steps == 2
    assert_same(traces(tmp_path / "run"), unbroken)
    longer = tree(kind, tiny_model, tmp_path, eval__stop_after={**NEVER, "patience": 4})
    assert start(tmp_path / "run", longer, resume=True).steps == 4
    whole = start(tmp_path / "run", tree(kind, tiny_model, tmp_path, eval__stop_after=None), resume=True)
    assert (whole.steps, whole.plateau) == (5, "")


def test_a_metric_that_no_evaluation_has_ends_the_run_before_its_first_step(tiny_model, tmp_path):
    config = tree("train", tiny_model, tmp_path, eval__stop_after={"patience": 1, "metric": "accurracy"})
    with pytest.raises(
        RunEnded, match="eval.stop_after.metric=accurracy: the evaluation has no such metric; it has acc"
    ):
        go(tmp_path / "run", config)
    assert not any(record["kind"] == "train" for record in RunFolder(tmp_path / "run").read_metrics())


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_a_plateau_needs_evaluations_during_the_run(kind, tiny_model, tmp_path):
    start = tiny_sft.go if kind == "sft" else go
    for changes in ({"eval__every": 0}, {"eval__task": None}):
        with pytest.raises(ConfigError, match=r"eval.stop_after.*needs evaluations during the run; set eval.task, and"):
            start(tmp_path / "run", tree(kind, tiny_model, tmp_path, **changes))


def test_a_length_has_no_best(tiny_model, tmp_path):
    named = [{"eval__stop_after": {"patience": 1, "metric": "length"}}, {"eval__metric": "truncated"}]
    for changes in named:
        with pytest.raises(ConfigError, match="eval.stop_after.metric.*is not better when it is higher"):
            go(tmp_path / "run", tree("train", tiny_model, tmp_path, **changes))
