"""Runs that train a mixture of experts under the experts that the engine chose."""

import json

import pytest

from proxima.data import UserError
from proxima.runtime.state.folder import RunFolder
from proxima.train.replay_comparison import KEPT
from tests.runtime.tiny_run import assert_same, go, recipe, traces

ROUTED = {
    "train__steps": 2,
    "eval__every": 0,
    "engine__routed_experts": True,
    "algorithm__routing_replay": "rollout",
    "model__compute_dtype": "bfloat16",
    "model__gradient_checkpointing": True,
}


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("routed") / "run"
    go(folder, recipe(tiny_model("qwen3_moe"), **ROUTED))
    return folder


def test_every_step_tells_what_the_routes_bring(run):
    """The engine computes in float32, the trainer in bfloat16: some tokens would go elsewhere."""
    steps = [r for r in map(json.loads, RunFolder(run).metrics.read_text().splitlines()) if r["kind"] == "train"]
    assert len(steps) == 2 and all(r["routing/fallback_fraction"] == 0 for r in steps)
    for way in ("replay", "no_replay"):
        assert all(r[f"routing/{way}_{name}"] > 0 for name in KEPT for r in steps)
    assert any(r["routing/replay_k3_kl"] < r["routing/no_replay_k3_kl"] for r in steps)


def test_stored_routes_are_replayed_to_the_bit(run, tiny_model, tmp_path):
    go(tmp_path / "run", recipe(tiny_model("qwen3_moe"), **ROUTED | {"rollouts": str(run)}))
    actual, expected = traces(tmp_path / "run"), traces(run)
    assert_same(*({name: trace[name] for name in ("rollouts", "tensors")} for trace in (actual, expected)))


@pytest.mark.parametrize("changed", [{"num_experts_per_tok": 1}, {"num_hidden_layers": 1}, {"num_local_experts": 4}])
def test_routes_of_another_mixture_are_refused(run, tiny_model, tmp_path, changed):
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model("qwen3_moe").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changed))
    refused = r"has 2 experts of each token in each of 2 layers, up to number \d, and model.path \d in \d, of \d; set"
    with pytest.raises(UserError, match=f"{refused} algorithm.routing_replay=off"):
        go(tmp_path / "run", recipe(model, **ROUTED | {"rollouts": str(run)}))
