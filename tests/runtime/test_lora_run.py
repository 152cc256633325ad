"""Whole runs with an adapter: what a checkpoint holds, resume to the bit, the reference, and what takes the result."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from proxima.data import UserError
from proxima.model.load import load
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.run_checkpoints import export
from proxima.training.checkpoint import damage
from tests.runtime.runs import LORA
from tests.runtime.tiny_run import NO_EVAL, go, recipe, rollouts_of, saved_in, steps_of


@pytest.fixture
def whole(runs):
    """The folder of a finished run; read-only by agreement."""
    return runs.finished("adapter")


@pytest.fixture
def base(tiny_model):
    return tiny_model("llama")


def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(whole):
    last = saved_in(whole)[-1]
    assert {p.name for p in last.model.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors", "base.json"}
    assert not list(last.model.glob("model*")) and damage(last.path) is None
    trained = load_file(last.model / "adapter_model.safetensors")
    moments = load_file(last.path / "optimizer.safetensors")
    shapes = [(32, 32), (32, 16), (32, 16), (32, 32), *[(32, 64)] * 3]  # of q, k, v, o, gate, up and down
    assert sum(x.numel() for x in trained.values()) == 2 * sum(4 * (a + b) for a, b in shapes)
    assert {name.partition("/")[0] for name in moments} == {"exp_avg", "exp_avg_sq", "step"}
    assert len(moments) == 3 * len(trained) == 3 * 28
    first = load_file(saved_in(whole)[0].model / "adapter_model.safetensors")
    assert all(not torch.equal(trained[name], first[name]) for name in trained), "all of them are trained"
    assert (RunFolder(whole).checkpoint(3) / "model" / "base.json").read_text().count("model.safetensors") == 1


@pytest.mark.slow
def test_the_reference_is_the_base_whose_weights_are_read_once(runs, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr("proxima.model.model_source.load", lambda *what, **how: read.append(what) or load(*what, **how))
    runs.go("adapter", tmp_path / "run", train__steps=2, train__updates_per_step=1, **NO_EVAL)
    first, second = (record["reference_kl/mean"] for record in steps_of(tmp_path / "run"))
    assert first == pytest.approx(0, abs=1e-6) and second > 1e-4
    assert len(read) == 1


def test_the_engine_and_the_trainer_agree(whole):
    for record in steps_of(whole):
        assert record["mismatch/kl"] < 1e-6, record["step"]


def test_without_an_adapter_there_is_none_to_export(runs, tmp_path):
    with pytest.raises(UserError, match="was trained without model.lora, so it has no adapter; leave out --adapter"):
        export(runs.finished("plain"), tmp_path / "out", adapter=True)


@pytest.mark.slow
def test_a_run_continues_from_an_adapter(whole, base, runs, tmp_path):
    """The first completions of the second run are those of the first run's policy."""
    start = str(export(whole, tmp_path / "adapter", adapter=True))
    config = runs.tree("adapter", model__lora=LORA | {"path": start}, train__steps=1, **NO_EVAL)
    go(tmp_path / "run", config)
    merged = recipe(export(whole, tmp_path / "merged"), train__steps=1, **NO_EVAL)
    go(tmp_path / "plain", merged)
    pair = [rollouts_of(tmp_path / name, 1) for name in ("run", "plain")]
    assert [row["tokens"] for row in pair[0]] == [row["tokens"] for row in pair[1]]
    inputs = json.loads((tmp_path / "run" / "environment.json").read_text())["model"]
    assert inputs["path"] == str(base)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(os.urandom(10))
    with pytest.raises(UserError, match=r"model.lora.path: adapter_model.safetensors: changed since the run"):
        go(tmp_path / "run", config, resume=True)
