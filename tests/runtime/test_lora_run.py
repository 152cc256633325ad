"""Whole runs with an adapter: what a checkpoint holds, resume to the bit, the reference, and what takes the result."""

import json
import os

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from proxima.config import resolve
from proxima.data import UserError
from proxima.model import load
from proxima.model.compute_thread import ComputeThread
from proxima.runtime.launch.forward_passes import make_stages
from proxima.runtime.state.export import export
from proxima.runtime.state.folder import RunFolder
from proxima.train import LogProbStage
from proxima.train.checkpoint_restore import damage
from tests.model.adapters import move, with_adapter
from tests.model.rows import MIXED, rows
from tests.runtime.runs import LORA
from tests.runtime.tiny_run import assert_same, go, recipe, rollouts_of, saved_in, steps_of, traces


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
    assert (RunFolder(whole).checkpoint(4) / "model" / "base.json").read_text().count("model.safetensors") == 1


def test_another_adapter_or_none_is_another_run(whole, runs):
    for lora, said in ((LORA | {"rank": 8}, "model.lora.rank=8"), (None, "model.lora")):
        with pytest.raises(UserError, match="differs from") as caught:
            runs.go("adapter", whole, model__lora=lora, resume=True)
        assert str(caught.value).startswith(said)


def test_the_reference_is_the_base_without_a_second_model(base, runs):
    """`make_stages` reads no weights again, and its stage gives the base's log-probs to the bit."""
    config = resolve(runs.tree("adapter")).config
    adapted = with_adapter(base)
    source = config.model.source()
    policy = source.policy(adapted)
    stage = next(
        s
        for s in make_stages(config, source, policy, ComputeThread(), {}, None, leads=True)
        if s.column == "reference_log_prob"
    )
    assert stage.policy is policy
    plain = LogProbStage("reference_log_prob", source.policy(load(str(base), device="cpu")))
    items = rows(*MIXED)
    with torch.no_grad():
        expected = plain(plain.pack(items))
        for seed in (1, 2):
            move(adapted, seed)
            assert torch.equal(stage(stage.pack(items)), expected)
            assert not torch.equal(policy(policy.pack(items)).log_prob, expected)


def test_the_engine_and_the_trainer_agree(whole):
    for record in steps_of(whole):
        assert record["mismatch/kl"] < 1e-6, record["step"]


def test_export_merges_or_copies_and_transformers_agrees(whole, base, tmp_path):
    merged = export(whole, tmp_path / "merged")
    adapter = export(whole, tmp_path / "adapter", adapter=True)
    assert not list(merged.glob("*adapter*")) and (adapter / "adapter_config.json").is_file()
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(merged, dtype="auto")
        assert plain.dtype == torch.float32
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        torch.testing.assert_close(plain(tokens).logits, theirs(tokens).logits, rtol=0, atol=2e-5)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(adapter)(tokens).logits, theirs(tokens).logits)
        start = AutoModelForCausalLM.from_pretrained(base)(tokens).logits
        assert float((plain(tokens).logits - start).abs().max()) > 0.01


def test_without_an_adapter_there_is_none_to_export(runs, tmp_path):
    with pytest.raises(UserError, match="was trained without model.lora, so it has no adapter; leave out --adapter"):
        export(runs.finished("plain"), tmp_path / "out", adapter=True)


def test_a_run_continues_from_an_adapter(whole, base, runs, tmp_path):
    """The first completions of the second run are those of the first run's policy."""
    start = str(export(whole, tmp_path / "adapter", adapter=True))
    config = runs.tree("adapter", model__lora=LORA | {"path": start}, train__steps=1, eval__every=0)
    go(tmp_path / "run", config)
    merged = recipe(export(whole, tmp_path / "merged"), train__steps=1, eval__every=0)
    go(tmp_path / "plain", merged)
    pair = [rollouts_of(tmp_path / name, 1) for name in ("run", "plain")]
    assert [row["tokens"] for row in pair[0]] == [row["tokens"] for row in pair[1]]
    inputs = json.loads((tmp_path / "run" / "environment.json").read_text())["model"]
    assert inputs["path"] == str(base)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(os.urandom(10))
    with pytest.raises(UserError, match=r"model.lora.path: adapter_model.safetensors: changed since the run"):
        go(tmp_path / "run", config, resume=True)


def test_checkpointing_of_activations_changes_no_bit(runs, tmp_path):
    runs.go("adapter", tmp_path / "run", model__gradient_checkpointing=True)
    assert_same({"metrics": traces(tmp_path / "run")["metrics"]}, {"metrics": runs.traces("adapter")["metrics"]})
