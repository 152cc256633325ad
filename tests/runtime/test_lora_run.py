"""Whole runs with an adapter: what a checkpoint holds, resume to the bit, the reference, and what takes the result."""

import json
import os
import shutil

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from proxima.config import resolve
from proxima.data import UserError
from proxima.model import load
from proxima.model.compute_thread import ComputeThread
from proxima.runtime.launch.learning import make_stages
from proxima.runtime.launch.models import make_policy
from proxima.runtime.state.best_checkpoint import best_checkpoint
from proxima.runtime.state.export import export, find_checkpoint
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.train import LogProbStage
from proxima.train.checkpoint import checkpoints
from proxima.train.checkpoint_restore import damage
from tests.model.adapters import move, with_adapter
from tests.model.rows import MIXED, rows
from tests.runtime.interruptions import PLACES, Died, die_at, start, start_and_hold
from tests.runtime.tiny_run import assert_same, go, recipe, traces

LORA = {"rank": 4, "alpha": 8.0}
KL = {"preset": "grpo", "reference_kl": {"kind": "k3", "coefficient": 0.1}}


def tree(model, **changes):
    settings = {
        "model__lora": LORA,
        "algorithm": KL,
        "train__steps": 4,
        "train__updates_per_step": 2,
        "train__optimizer": {"kind": "adamw", "lr": 3e-2, "weight_decay": 0.01},
    }
    return recipe(model, **(settings | changes))


@pytest.fixture(scope="module")
def base(tiny_model, tmp_path_factory):
    return shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """The folder of a finished run; read-only by agreement."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    assert go(folder, tree(base)).status == "done"
    return folder


@pytest.fixture(scope="module")
def unbroken(whole):
    return traces(whole)


def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(whole, base):
    last = checkpoints(RunFolder(whole).checkpoints)[-1]
    assert {p.name for p in last.model.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors", "base.json"}
    assert not list(last.model.glob("model*")) and damage(last.path) is None
    trained = load_file(last.model / "adapter_model.safetensors")
    moments = load_file(last.path / "optimizer.safetensors")
    shapes = [(32, 32), (32, 16), (32, 16), (32, 32), *[(32, 64)] * 3]  # of q, k, v, o, gate, up and down
    assert sum(x.numel() for x in trained.values()) == 2 * sum(4 * (a + b) for a, b in shapes)
    assert {name.partition("/")[0] for name in moments} == {"exp_avg", "exp_avg_sq", "step"}
    assert len(moments) == 3 * len(trained) == 3 * 28
    first = load_file(checkpoints(RunFolder(whole).checkpoints)[0].model / "adapter_model.safetensors")
    assert all(not torch.equal(trained[name], first[name]) for name in trained), "all of them are trained"
    assert (RunFolder(whole).checkpoint(4) / "model" / "base.json").read_text().count("model.safetensors") == 1


@pytest.mark.parametrize("place", ["while training", "after step 3", "while evaluating before", "after the last step"])
@pytest.mark.parametrize("every", [1, 2])
def test_death_then_resume_is_as_if_unbroken(place, every, unbroken, base, tmp_path):
    config = tree(base, checkpoint__every=every)
    with pytest.raises(Died):
        go(tmp_path / "run", config, observer=die_at(*PLACES[place]))
    torch.manual_seed(77)
    assert go(tmp_path / "run", config, resume=True).status == "done"
    assert_same(traces(tmp_path / "run"), unbroken)


@pytest.mark.parametrize("critic", ["head", "model"])
def test_a_critic_beside_an_adapter_is_resumed_too(critic, base, tmp_path):
    """The head is trained on the trunk with its adapter; a model of its own has none."""
    ppo = {"critic": {"kind": critic, "head_std": 0.02}, "algorithm": {"preset": "ppo", "advantage": {"kind": "gae"}}}
    config = tree(base, train__steps=3, checkpoint__every=2, **ppo)
    go(tmp_path / "whole", config)
    with pytest.raises(Died):
        go(tmp_path / "run", config, observer=die_at(*PLACES["after step 3"]))
    go(tmp_path / "run", config, resume=True)
    assert_same(traces(tmp_path / "run"), traces(tmp_path / "whole"))
    last = checkpoints(RunFolder(tmp_path / "run").checkpoints)[-1]
    assert (last.model / "adapter_model.safetensors").is_file()
    assert (last.path / "critic" / "model.safetensors").is_file() == (critic == "model")


def test_kill_9_in_a_real_process(unbroken, base, tmp_path):
    held = tree(base, reward=[{"kind": "tests.runtime.tiny_run:Even", "hold": str(tmp_path / "hold")}])
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(held))
    folder = tmp_path / "run"
    for step in (2, 4):
        process = start_and_hold(folder, 4 * (step - 1) + 1, "--resume")
        process.kill()
        process.communicate()
    (tmp_path / "hold").unlink()
    process = start(folder, "--resume")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert_same(traces(folder), unbroken)


def test_a_damaged_adapter_is_passed_over(whole, unbroken, base, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    file = RunFolder(tmp_path / "run").checkpoint(4) / "model" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    go(tmp_path / "run", tree(base), resume=True)
    assert_same(traces(tmp_path / "run"), unbroken)


def test_another_adapter_or_none_is_another_run(whole, base):
    for lora, said in ((LORA | {"rank": 8}, "model.lora.rank=8"), (None, "model.lora")):
        with pytest.raises(UserError, match="differs from") as caught:
            go(whole, tree(base, model__lora=lora), resume=True)
        assert str(caught.value).startswith(said)


def test_the_reference_is_the_base_without_a_second_model(base, tmp_path):
    """`make_stages` reads no weights again, and its stage gives the base's log-probs to the bit."""
    config = resolve(tree(base)).config
    adapted = with_adapter(base)
    policy = make_policy(config.model, adapted)
    stage = next(s for s in make_stages(config, policy, ComputeThread()) if s.column == "reference_log_prob")
    assert stage.policy is policy
    plain = LogProbStage("reference_log_prob", make_policy(config.model, load(str(base), device="cpu")))
    items = rows(*MIXED)
    with torch.no_grad():
        expected = plain(plain.pack(items))
        for seed in (1, 2):
            move(adapted, seed)
            assert torch.equal(stage(stage.pack(items)), expected)
            assert not torch.equal(policy(policy.pack(items)).log_prob, expected)


def test_the_engine_and_the_trainer_agree(whole):
    for record in (r for r in RunFolder(whole).read_metrics() if r["kind"] == "train"):
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


def test_without_an_adapter_there_is_none_to_export(base, tmp_path):
    quick = {"train__steps": 1, "eval__every": 0, "eval__before": False, "eval__after": False}
    go(tmp_path / "run", recipe(base, **quick))
    with pytest.raises(UserError, match="was trained without model.lora, so it has no adapter; leave out --adapter"):
        export(tmp_path / "run", tmp_path / "out", adapter=True)


def test_the_best_checkpoint_is_kept_and_found(base, tmp_path):
    config = tree(base, checkpoint={"every": 1, "keep_last": 1, "keep_best": True}, eval__every=1)
    go(tmp_path / "run", config)
    folder = RunFolder(tmp_path / "run")
    best = best_checkpoint(folder, checkpoints(folder.checkpoints))
    assert find_checkpoint(tmp_path / "run", "best").path == best.path
    assert load(str(best.model), device="cpu").name == f"run step {best.step}"


def test_a_run_continues_from_an_adapter(whole, base, tmp_path):
    """The first completions of the second run are those of the first run's policy."""
    start = str(export(whole, tmp_path / "adapter", adapter=True))
    config = tree(base, model__lora=LORA | {"path": start}, train__steps=1, eval__every=0)
    go(tmp_path / "run", config)
    merged = recipe(load_folder(whole, tmp_path), train__steps=1, eval__every=0)
    go(tmp_path / "plain", merged)
    pair = [read_rows(RunFolder(tmp_path / name).rollout_file(1)) for name in ("run", "plain")]
    assert [row["tokens"] for row in pair[0]] == [row["tokens"] for row in pair[1]]
    inputs = json.loads((tmp_path / "run" / "environment.json").read_text())["model"]
    assert inputs["path"] == str(base)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(os.urandom(10))
    with pytest.raises(UserError, match=r"model.lora.path: adapter_model.safetensors: changed since the run"):
        go(tmp_path / "run", config, resume=True)


def load_folder(run, tmp_path):
    return export(run, tmp_path / "merged")


def test_checkpointing_of_activations_changes_no_bit(base, unbroken, tmp_path):
    go(tmp_path / "run", tree(base, model__gradient_checkpointing=True))
    assert_same({"metrics": traces(tmp_path / "run")["metrics"]}, {"metrics": unbroken["metrics"]})
