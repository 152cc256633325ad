"""A reward model that trains an adapter and its head: its checkpoint, export, and its use as a reward."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from proxima.model.scalar_model import load_scalar_model
from proxima.reward.model_reward import ModelReward
from proxima.runtime.state.run_checkpoints import export, find_checkpoint
from tests.runtime.tiny_run import evals_of

pytestmark = pytest.mark.slow

TOKENS = torch.arange(3, 40)[None]


@pytest.fixture
def whole(runs):
    """The folder of a finished run; read-only by agreement."""
    return runs.finished("reward model of an adapter")


def test_a_checkpoint_holds_adapter_and_head_and_is_a_reward(whole, tmp_path):
    last = find_checkpoint(whole).model
    assert {file.name for file in last.glob("*.safetensors")} == {"adapter_model.safetensors"}
    config = json.loads((last / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["reward_normalization"]["std"] > 0
    ModelReward(path=str(last), normalize=True).check()
    merged = AutoModelForSequenceClassification.from_pretrained(export(whole, tmp_path / "merged"))
    ours = load_scalar_model(str(last), device="cpu").model
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, ours(TOKENS).logits)
    assert merged.config.num_labels == 1 and merged.config.reward_normalization == config["reward_normalization"]
    first = load_scalar_model(str(find_checkpoint(whole, "1").model), device="cpu").model
    assert not torch.equal(first.score.weight, ours.score.weight), "the head is trained"


def test_a_reward_model_continues_from_an_adapter(whole, runs, tmp_path):
    start = export(whole, tmp_path / "adapter", adapter=True)
    lora = {"rank": 4, "alpha": 8.0, "path": str(start)}
    runs.go("reward model of an adapter", tmp_path / "run", model__lora=lora, train__steps=1)
    assert evals_of(tmp_path / "run")[0]["loss"] == pytest.approx(evals_of(whole)[-1]["loss"], rel=1e-6)
