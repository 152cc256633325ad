"""A run on a fixed data set, killed or stopped, and resumed: to the bit as if nothing had happened."""

import os
import signal
from pathlib import Path

import pytest

from proxima.data import FieldErrors, UserError
from proxima.runtime.state.folder import RunFolder
from proxima.train.checkpoint import checkpoints
from tests.runtime.kill_after import kill_after
from tests.runtime.offline.tiny_sft import go, recipe
from tests.runtime.tiny_run import Watcher, assert_same, traces

STEPS = 4


@pytest.fixture(scope="module")
def tree(tiny_model, tmp_path_factory):
    return lambda **changes: recipe(tiny_model("llama"), tmp_path_factory.getbasetemp() / "rows", **changes)


@pytest.fixture(scope="module")
def unbroken(tree, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    go(folder, tree())
    return traces(folder)


class Died(BaseException):
    """A process that ends without a word, as far as the run can tell."""


def once(act, event, matches):
    acted = []

    def on(seen, *facts):
        if seen == event and not acted and matches(*facts):
            acted.append(1)
            act()

    return Watcher(on)


def die():
    raise Died


def press():
    os.kill(os.getpid(), signal.SIGINT)


PLACES = {
    "before training": ("progress", lambda stage, *_: stage == "train"),
    "while evaluating before": ("progress", lambda stage, *_: stage == "evaluate"),
    "after the evaluation before": ("evaluated", lambda record: record["step"] == 0),
    "after step 1": ("step", lambda record, sample: record["step"] == 1),
    "in the second epoch": ("step", lambda record, sample: record["step"] == 3),
    "after the evaluation at 2": ("evaluated", lambda record: record["step"] == 2),
    "while saving step 2": ("progress", lambda stage, *_: stage == "checkpoint"),
    "after the last step": ("step", lambda record, sample: record["step"] == STEPS),
    "after the last evaluation": ("evaluated", lambda record: record["step"] == STEPS),
}


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_death_then_resume_is_as_if_unbroken(place, every, unbroken, tree, tmp_path):
    with pytest.raises(Died):
        go(tmp_path / "run", tree(checkpoint__every=every), observer=once(die, *PLACES[place]))
    assert go(tmp_path / "run", tree(checkpoint__every=every), resume=True).status == "done"
    assert_same(traces(tmp_path / "run"), unbroken)


@pytest.mark.parametrize("place", ["before training", "while evaluating before", "after step 1", "in the second epoch"])
def test_ctrl_c_writes_a_checkpoint_and_the_resume_is_as_if_unbroken(place, unbroken, tree, tmp_path):
    summary = go(tmp_path / "run", tree(checkpoint__every=0), observer=once(press, *PLACES[place]))
    assert summary.status == "stopped"
    assert [c.step for c in checkpoints(RunFolder(tmp_path / "run").checkpoints)] == [summary.steps] * (
        summary.steps > 0
    )
    go(tmp_path / "run", tree(checkpoint__every=0), resume=True)
    assert_same(traces(tmp_path / "run"), unbroken)


def test_resume_of_a_finished_run_changes_nothing(unbroken, tree, tmp_path):
    go(tmp_path / "run", tree())
    watcher = Watcher()
    go(tmp_path / "run", tree(), resume=True, observer=watcher)
    assert not watcher.records
    assert_same(traces(tmp_path / "run"), unbroken)


def test_more_epochs_than_at_first(tree, tmp_path):
    """The last step of an epoch has the rest of its rows; the longer run is the one that asked for both at once."""
    settings = {"train__steps": 0, "train__schedule": "constant", "eval__after": False}
    assert go(tmp_path / "run", tree(**settings)).steps == 3
    assert go(tmp_path / "run", tree(**settings, train__epochs=2), resume=True).steps == 6
    records = [r for r in RunFolder(tmp_path / "run").read_metrics() if r["kind"] == "train"]
    assert [r["examples"] for r in records] == [4, 4, 2] * 2 and [records[i]["epoch"] for i in (2, 5)] == [1, 2]
    go(tmp_path / "long", tree(**settings, train__epochs=2))
    assert_same(traces(tmp_path / "run"), traces(tmp_path / "long"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train__examples_per_step": 2}, "train.examples_per_step=2"),
        ({"sft__loss_on": "all_turns"}, "sft.loss_on='all_turns'"),
        ({"data__shuffle": False}, "data.shuffle=False"),
        ({"seed": 4}, "seed=4"),
    ],
)
def test_another_config_is_another_run(changes, field, tree, tmp_path):
    go(tmp_path / "run", tree(train__steps=1, eval__after=False))
    with pytest.raises(FieldErrors, match=field):
        go(tmp_path / "run", tree(train__steps=1, eval__after=False, **changes), resume=True)


def test_other_rows_are_another_run(tiny_model, tmp_path):
    config = recipe(tiny_model("llama"), tmp_path / "rows", train__steps=1)
    go(tmp_path / "run", config)
    file = Path(config["task"]["path"])
    file.write_text(file.read_text().replace("It is 2", "It is 3"))
    with pytest.raises(UserError, match="task: its rows: changed since the run in"):
        go(tmp_path / "run", config, resume=True)


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_kill_9_at_any_instant(seconds, unbroken, tree, tmp_path):
    kill_after(seconds, tmp_path / "run", tree(), module="tests.runtime.offline.tiny_sft")
    go(tmp_path / "run", tree(), resume=True)
    assert_same(traces(tmp_path / "run"), unbroken)
