"""SFT of an adapter: what its checkpoint holds, resume to the bit, and an evaluation of it."""

import pytest

from proxima.model import load
from proxima.runtime.state.folder import RunFolder
from proxima.train.checkpoint import checkpoints
from tests.runtime.offline.test_offline_resume import PLACES, Died, die, once
from tests.runtime.offline.tiny_sft import go, recipe
from tests.runtime.tiny_run import assert_same, traces


@pytest.fixture(scope="module")
def tree(tiny_model, tmp_path_factory):
    lora = {"model__lora": {"rank": 4, "alpha": 8.0}}
    return lambda **changes: recipe(
        tiny_model("llama"), tmp_path_factory.getbasetemp() / "lora-rows", **(lora | changes)
    )


@pytest.fixture(scope="module")
def whole(tree, tmp_path_factory):
    """The folder of a finished run; read-only by agreement."""
    folder = tmp_path_factory.mktemp("lora-sft") / "run"
    go(folder, tree())
    return folder


def test_a_checkpoint_holds_the_adapter_alone(whole):
    last = checkpoints(RunFolder(whole).checkpoints)[-1]
    assert {file.name for file in last.model.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert load(str(last.model), device="cpu").adapter_parameters == 0


@pytest.mark.parametrize("place", ["in the second epoch", "after the evaluation at 2", "while saving step 2"])
def test_death_then_resume_is_as_if_unbroken(place, whole, tree, tmp_path):
    with pytest.raises(Died):
        go(tmp_path / "run", tree(), observer=once(die, *PLACES[place]))
    assert go(tmp_path / "run", tree(), resume=True).status == "done"
    assert_same(traces(tmp_path / "run"), traces(whole))


def test_the_adapter_learns_the_answers(tree, tmp_path):
    go(tmp_path / "run", tree(train__optimizer={"kind": "adamw", "lr": 0.03}))
    records = [r for r in RunFolder(tmp_path / "run").read_metrics() if r["kind"] == "eval"]
    losses = [next(value for name, value in r.items() if name.endswith("loss")) for r in records]
    assert losses[-1] < losses[0] - 0.1
