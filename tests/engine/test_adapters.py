"""A trained model with adapters publishes them merged: the engine's log-probs are the trainer's, and the trained model
is as it was."""

import asyncio
import weakref

import pytest
import torch

from proxima.engine.protocol import WeightUpdate
from proxima.model.adapters.lora import Lora
from proxima.model.architecture import weight_of
from proxima.model.load import load
from proxima.model.policy import Policy
from tests.engine.helpers import behavior, engine, policy_log_prob, requests, run
from tests.model.adapters import move, with_adapter

pytestmark = pytest.mark.slow

ALL = Lora(rank=4, alpha=8)
HEAD = Lora(rank=4, alpha=8, dora=True, targets=("lm_head", "q_proj", "down_proj"))


def published(folder, lora, decoder, dtype=torch.float32):
    """An engine that was built before the adapter moved, and the trainer's model."""
    model = with_adapter(folder, lora, moved=False)
    made = engine(model, decoder, dtype)
    move(model)
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in model.model.named_parameters()}
    asyncio.run(made.publish(WeightUpdate(version=1, module=model.model)))
    after = dict(model.model.named_parameters())
    assert before.keys() == after.keys()
    for name, (value, trained) in before.items():
        assert torch.equal(after[name], value) and after[name].requires_grad == trained, name
    return made, model


@pytest.mark.parametrize(
    ("kind", "decoder", "lora"),
    [
        ("llama", "fast", Lora(rank=2, dora=True, rslora=True)),
        ("qwen2", "fast", HEAD),
        ("qwen3", "general", HEAD),
        ("gpt2", "general", Lora(rank=4, dora=True)),
        ("llama", "recompute", ALL),
    ],
)
def test_the_engine_samples_from_the_trained_policy(kind, decoder, lora, tiny_model):
    made, model = published(tiny_model(kind), lora, decoder)
    asked = requests(3, 2, max_tokens=10)
    given = run(made, asked)
    expected = policy_log_prob(Policy(model), asked, given)
    torch.testing.assert_close(behavior(given), expected, rtol=0, atol=2e-5)
    base = policy_log_prob(Policy(with_adapter(tiny_model(kind), lora, moved=False)), asked, given)
    assert float((base - expected).abs().mean()) > 0.01, "the adapter does something"


@pytest.mark.parametrize("lora", [ALL, HEAD])
def test_in_bfloat16_they_differ_by_rounding(lora, tiny_model):
    """Merged weights are rounded once, the trainer's base and adapter each: no more than twice what rounding costs the
    base alone."""
    made, model = published(tiny_model("llama"), lora, "fast", torch.bfloat16)
    asked = requests(4, 8)
    given = run(made, asked)
    policy = Policy(model, compute_dtype=torch.bfloat16)
    exact, ours = policy_log_prob(Policy(model), asked, given), policy_log_prob(policy, asked, given)
    rounding = float((ours - exact).abs().mean())
    assert 0 < float((behavior(given) - ours).abs().mean()) < 2 * rounding


@pytest.mark.parametrize(("decoder", "most"), [("fast", 3), ("general", 2)])
def test_merged_weights_are_few_at_a_time(decoder, most, tiny_model, monkeypatch):
    """Of the 14 there never are more beside the engine's own than it joins into one (query, key and value), or than
    the last and the next."""
    alive, seen = weakref.WeakSet(), []

    def watched(module):
        weight = weight_of(module)
        if hasattr(module, "lora_A"):
            alive.add(weight)
            seen.append(len(alive))
        return weight

    made, model = published(tiny_model("llama"), ALL, decoder)
    monkeypatch.setattr("proxima.engine.local.fast_decoder.weight_of", watched)
    monkeypatch.setattr("proxima.model.adapters.lora.weight_of", watched)
    asyncio.run(made.publish(WeightUpdate(version=2, module=model.model)))
    assert len(seen) == 14 and max(seen) == most


def test_the_start_of_an_adapter_is_the_base_to_the_bit(tiny_model):
    asked = requests(2, 4)
    models = with_adapter(tiny_model("llama"), ALL, moved=False), load(str(tiny_model("llama")), device="cpu")
    adapted, plain = (run(engine(model), asked) for model in models)
    assert adapted == plain
