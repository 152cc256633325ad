"""A run on a fixed data set, killed or stopped, and resumed: to the bit as if nothing had happened."""

from pathlib import Path

import pytest

from proxima.data import UserError
from tests.runtime.offline.tiny_sft import recipe
from tests.runtime.tiny_run import NO_EVAL, assert_same, go, steps_of, traces

pytestmark = pytest.mark.slow


def test_more_epochs_than_at_first(runs, tmp_path):
    """The last step of an epoch has the rest of its rows; the longer run is the one that asked for both at once."""
    settings = {"train__steps": 0, "train__schedule": "constant", "eval__samples": 0, **NO_EVAL}
    assert runs.go("sft", tmp_path / "run", **settings).steps == 3
    assert runs.go("sft", tmp_path / "run", **settings, train__epochs=2, resume=True).steps == 6
    records = steps_of(tmp_path / "run")
    assert [r["examples"] for r in records] == [4, 4, 2] * 2 and [records[i]["epoch"] for i in (2, 5)] == [1, 2]
    runs.go("sft", tmp_path / "long", **settings, train__epochs=2)
    assert_same(traces(tmp_path / "run"), traces(tmp_path / "long"))


def test_other_rows_are_another_run(tiny_model, tmp_path):
    config = recipe(tiny_model("llama"), tmp_path / "rows", train__steps=1)
    go(tmp_path / "run", config)
    file = Path(config["task"]["path"])
    file.write_text(file.read_text().replace("It is 2", "It is 3"))
    with pytest.raises(UserError, match="task: its rows: changed since the run in"):
        go(tmp_path / "run", config, resume=True)
