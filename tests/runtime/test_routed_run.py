"""Runs that train a mixture of experts under the experts that the engine chose."""

import json
import shutil

import pytest

from proxima.data import UserError
from tests.runtime.tiny_run import steps_of


@pytest.fixture
def run(runs):
    return runs.finished("routed experts")


def test_every_token_goes_where_the_engine_sent_it(run):
    """The engine computes in float32, the trainer in bfloat16: some tokens would go elsewhere."""
    steps = steps_of(run)
    assert len(steps) == 2 and all(r["routing/fallback_fraction"] == 0 for r in steps)
    assert any(r["routing/differing_fraction"] > 0 for r in steps)


@pytest.mark.parametrize("changed", [{"num_experts_per_tok": 1}, {"num_hidden_layers": 1}, {"num_local_experts": 4}])
def test_routes_of_another_mixture_are_refused(run, runs, tiny_model, tmp_path, changed):
    model = shutil.copytree(tiny_model("qwen3_moe"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changed))
    refused = (
        r"2 experts per token in each of 2 layers, numbered up to \d, and model.path has \d in each of \d, of \d; set"
    )
    with pytest.raises(UserError, match=f"{refused} algorithm.routing_replay=off"):
        runs.go("routed experts", tmp_path / "run", rollouts=str(run), model__path=str(model))
