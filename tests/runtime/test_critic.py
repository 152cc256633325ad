"""A critic in a run: values before the advantages, its own updates, its checkpoint, and what is refused."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from proxima.config.resolution import resolve
from proxima.data import FieldError, NotFiniteError, UserError
from proxima.model.load import load, save
from proxima.model.scalar_model import load_scalar_model
from proxima.runtime.launch.learning import make_critic
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.runtime.state.run_checkpoints import export
from proxima.training.optimizer import Schedule
from tests.runtime.runs import CRITIC, PPO
from tests.runtime.tiny_run import rollouts_of, saved_in, steps_of

STEPS = 4


# ---- values and advantages -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_values_are_those_of_the_weights_before_the_step(runs, tiny_model, tmp_path):
    """The first step's advantages, from a forward of Hugging Face's class over each completion alone."""
    config = resolve({**runs.tree("critic"), "folder": str(tmp_path)}).config
    policy = load(str(tiny_model("llama")))
    critic, _ = make_critic(config.critic, config.train, config.model.source(config.seed), policy)
    rows = rollouts_of(runs.finished("critic"), 1)
    model, raw = load_scalar_model(str(tiny_model("llama")), new_head=0.02, seed=config.seed, device="cpu").model, []
    for row in rows:
        tokens = torch.tensor([[*row["prompt_tokens"], *row["tokens"]]])
        with torch.no_grad():
            states = model.score(model.model(input_ids=tokens, use_cache=False).last_hidden_state)[0, :, 0]
        value = states[len(row["prompt_tokens"]) - 1 :].double().tolist()
        after = value.pop() if row["finish_reason"] == "length" else value.pop() * 0
        out, carry = [], 0.0
        for t in reversed(range(len(value))):
            last = t == len(value) - 1
            delta = (row["reward"] if last else 0.0) + (after if last else value[t + 1]) - value[t]
            carry = delta + 0.9 * carry
            out.insert(0, carry)
        raw.append(out)
    every = np.concatenate(raw)
    whitened = [(np.array(values) - every.mean()) / every.std(ddof=1) for values in raw]
    assert any(row["finish_reason"] == "length" for row in rows)
    for row, expected in zip(rows, whitened, strict=True):
        advantages = row["token_advantage"] or [row["advantage"]] * len(row["tokens"])
        assert row["advantage"] == pytest.approx(expected.mean(), abs=1e-4)
        assert advantages == pytest.approx(expected, abs=1e-4)
    assert critic.stage.model.model.num_labels == 1


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_policy_waits_for_the_critic(runs, tiny_model):
    run = RunFolder(runs.finished("critic"))
    first, *later = steps_of(run.path)
    assert (first["policy_version"], first["updates"]) == (0, 0) and first["value/grad_norm"] > 0
    assert [step["policy_version"] for step in later] == [1, 2, 3]
    assert {row["outcome"] for row in read_rows(run.rollout_file(1))} == {"critic_only"}
    begun = load_file(tiny_model("llama") / "model.safetensors")
    for step, same in ((1, True), (2, False)):
        now = load_file(run.checkpoint(step) / "model" / "model.safetensors")
        assert all(torch.equal(now[name], begun[name]) for name in begun) is same
    assert json.loads((run.checkpoint(STEPS) / "state.json").read_text())["critic_trainer"] == {"updates": STEPS * 4}
    # the schedule of the policy ends at its own last update, not at that of a run without the wait
    last = {updates: 3e-3 * Schedule("cosine", updates, warmup=2).factor(updates - 1) for updates in (6, 8)}
    assert later[-1]["lr"] == pytest.approx(last[6])
    assert steps_of(runs.finished("value head"))[-1]["lr"] == pytest.approx(last[8])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["critic", "value head"])
def test_metrics_of_the_critic(kind, runs):
    steps = steps_of(runs.finished(kind))
    names = {"value/loss", "value/mean", "value/clip_fraction", "value/explained_variance", "returns/mean"}
    for step in steps:
        assert names <= step.keys() and "value/explained_variance_prompt_mean" in step
        assert ("value/grad_norm" in step) is (kind == "critic")
    assert steps[-1]["value/loss"] < steps[0]["value/loss"]


@pytest.mark.slow
def test_a_head_on_a_bfloat16_policy_learns_in_float32(runs, tmp_path):
    """By steps that bfloat16 would round away, and its checkpoint resumes in it."""
    changes = {"train__optimizer": {"kind": "adamw", "lr": 1e-6}, "train__warmup_steps": 0, "eval__every": 0}
    changes |= {
        "model__dtype": "bfloat16",
        "model__compute_dtype": "bfloat16",
        "model__lora": {"rank": 2, "alpha": 4.0},
    }
    for steps in (2, 3):
        runs.go("value head", tmp_path / "run", resume=True, critic__head_std=1.0, train__steps=steps, **changes)
    saved = [load_file(c.path / "value_head.safetensors") for c in saved_in(tmp_path / "run")]
    weights = [tensors["weight"] for tensors in saved]
    assert len(weights) == 3 and all(weight.dtype == torch.float32 for weight in weights)
    for before, after in pairwise(weights):
        assert 0 < (after - before).abs().max() < 1e-5


def test_behind_it_pruning_and_dynamic_sampling(runs, tmp_path):
    selection = [{"kind": "drop_uniform_groups"}, {"kind": "prune", "rate": 0.5}]
    algorithm = PPO | {"selection": selection, "dynamic_sampling": {"exhausted": "partial"}}
    assert runs.go("critic", tmp_path / "run", critic=CRITIC, algorithm=algorithm, train__steps=2).status == "done"
    rows = rollouts_of(tmp_path / "run", 2)
    assert {"trained", "dropped_pruned"} <= {row["outcome"] for row in rows}
    assert steps_of(tmp_path / "run")[-1]["value/loss"] > 0


# ---- checkpoint and resume -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_critic_of_a_checkpoint_is_a_classification_folder(runs, tmp_path):
    folder = RunFolder(runs.finished("critic")).checkpoint(STEPS) / "critic"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 1 and model.score.weight.shape == (1, 32)
    assert load_scalar_model(str(folder)).model.score.weight.equal(model.score.weight)
    out = export(runs.finished("critic"), tmp_path / "critic", critic=True)
    assert load_file(out / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    with pytest.raises(UserError, match="000004 has no critic: the run has none, or it is a head on the policy"):
        export(runs.finished("value head"), tmp_path / "other", critic=True)
    # and another run starts from it
    critic = CRITIC | {"path": str(folder)}
    assert runs.go("critic", tmp_path / "run", critic=critic, train__steps=1).status == "done"


# ---- bad input -------------------------------------------------------------------------------------------------------


def critic_folder(source, folder, change):
    """A scalar model's folder with a change to its weights."""
    loaded = load_scalar_model(str(source), new_head=0.1)
    save(loaded.model, loaded.tokenizer, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_folder_without_a_value_head_is_named(runs, tiny_model, tmp_path):
    folder = critic_folder(tiny_model("llama"), tmp_path / "rm", lambda weights: weights.pop("score.weight"))
    said = r"^critic.path='.*rm' lacks 1 of the model's weights, score.weight among them"
    with pytest.raises(FieldError, match=said):
        runs.go("critic", tmp_path / "run", critic__path=str(folder))


def test_a_critic_with_other_tokens_is_refused_before_any_weights(runs, tiny_model, tmp_path, monkeypatch):
    folder = critic_folder(tiny_model("llama"), tmp_path / "rm", lambda weights: None)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"!":', '"!!":'))
    monkeypatch.setattr("proxima.model.model_source.load", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(FieldError, match="has another vocabulary: .* there and .* in model.path .*; start the critic"):
        runs.go("critic", tmp_path / "run", critic__path=str(folder))


@pytest.mark.slow
def test_values_that_diverge_end_the_run(runs, tmp_path):
    optimizer = {"kind": "adamw", "lr": 1e30}
    with pytest.raises(Exception, match="the critic: the (norm of the )?(weights|gradient norm)") as caught:
        runs.go("critic", tmp_path / "run", critic__optimizer=optimizer, train__steps=2)
    assert isinstance(caught.value.__cause__, NotFiniteError)
