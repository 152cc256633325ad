"""A trained model with adapters publishes them merged: the engine's log-probs are the trainer's, and the trained model
is as it was."""

import asyncio
import weakref

import numpy as np
import pytest
import torch

from proxima.data import Trajectory
from proxima.engine.general_decoder import RecomputeDecoder
from proxima.engine.local import Local, LocalEngine
from proxima.engine.protocol import WeightUpdate
from proxima.model import Policy, load
from proxima.model.lora import Lora, weight_of
from tests.engine.helpers import behavior, requests, run
from tests.model.adapters import move, with_adapter

ALL = Lora(rank=4, alpha=8)
HEAD = Lora(rank=4, alpha=8, dora=True, targets=("lm_head", "q_proj", "down_proj"))


def published(folder, lora, decoder, dtype):
    """An engine that was built before the adapter moved, and the trainer's model."""
    model = with_adapter(folder, lora, moved=False)
    spec = Local(slots=8, dtype=dtype, decoder="general" if decoder == "recompute" else decoder)
    engine = LocalEngine(model, spec)
    if decoder == "recompute":
        engine.scheduler.decoder = RecomputeDecoder(model.model, torch.float32)
        engine.scheduler.cache = engine.scheduler.decoder.new_cache(engine.scheduler.slots)
    move(model)
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in model.model.named_parameters()}
    asyncio.run(engine.publish(WeightUpdate(version=1, module=model.model)))
    after = dict(model.model.named_parameters())
    assert before.keys() == after.keys()
    for name, (value, trained) in before.items():
        assert torch.equal(after[name], value) and after[name].requires_grad == trained, name
    return engine, model


@pytest.mark.parametrize(
    ("kind", "decoder", "lora"),
    [
        *(("llama", "fast", lora) for lora in (ALL, HEAD, Lora(rank=2, dora=True, rslora=True))),
        *(("qwen2", "fast", lora) for lora in (ALL, HEAD)),
        *(("qwen3", decoder, lora) for decoder in ("fast", "general") for lora in (ALL, HEAD)),
        *(("gpt2", "general", Lora(rank=4, dora=dora)) for dora in (False, True)),
        *(("llama", decoder, lora) for decoder in ("general", "recompute") for lora in (ALL, HEAD)),
    ],
)
def test_the_engine_samples_from_the_trained_policy(kind, decoder, lora, tiny_model):
    engine, model = published(tiny_model(kind), lora, decoder, "float32")
    asked = requests(3, 4)
    given = run(engine, asked)
    expected = trained_log_prob(Policy(model), asked, given)
    torch.testing.assert_close(behavior(given), expected, rtol=0, atol=2e-5)
    base = trained_log_prob(Policy(with_adapter(tiny_model(kind), lora, moved=False)), asked, given)
    assert float((base - expected).abs().mean()) > 0.01, "the adapter does something"


def trained_log_prob(policy, asked, given):
    rows = [
        Trajectory.of(r.prompt, c, group=i, advantage=0.0) for i, (r, c) in enumerate(zip(asked, given, strict=True))
    ]
    with torch.no_grad():
        return policy(policy.pack(rows)).need("log_prob")


@pytest.mark.parametrize("lora", [ALL, HEAD])
def test_in_bfloat16_they_differ_by_rounding(lora, tiny_model):
    """Merged weights are rounded once, the trainer's base and adapter each: no more than twice what rounding costs the
    base alone."""
    engine, model = published(tiny_model("llama"), lora, "fast", "bfloat16")
    asked = requests(4, 8)
    given = run(engine, asked)
    policy = Policy(model, compute_dtype=torch.bfloat16)
    exact, ours = trained_log_prob(Policy(model), asked, given), trained_log_prob(policy, asked, given)
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

    engine, model = published(tiny_model("llama"), ALL, decoder, "float32")
    monkeypatch.setattr("proxima.engine.fast_decoder.weight_of", watched)
    monkeypatch.setattr("proxima.model.lora_layers.weight_of", watched)
    asyncio.run(engine.publish(WeightUpdate(version=2, module=model.model)))
    assert len(seen) == 14 and max(seen) == most


def test_the_start_of_an_adapter_is_the_base_to_the_bit(tiny_model):
    asked = requests(2, 4)
    models = with_adapter(tiny_model("llama"), ALL, moved=False), load(str(tiny_model("llama")), device="cpu")
    given = [run(LocalEngine(engine, Local(slots=8, dtype="float32")), asked) for engine in models]
    for completion, other in zip(*given, strict=True):
        assert np.array_equal(completion.tokens, other.tokens)
        assert np.array_equal(completion.sampled_log_prob, other.sampled_log_prob)
