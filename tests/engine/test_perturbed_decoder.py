"""An engine that differs from the trainer on purpose: with rounded weights it is the plain engine of a model whose
weights a test has rounded, to the bit; with noise its distribution is the trainer's with a bias on the logits."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from proxima.data.random import LOGIT_BIAS, normals
from proxima.engine.local.decoder import Matrix
from proxima.engine.local.decoders import (
    Perturbation,
    PerturbedFastDecoder,
    PerturbedGeneralDecoder,
    PerturbedRecomputeDecoder,
    _input_axes,
    fake_quantized,
)
from proxima.engine.local.fast_decoder import FastDecoder
from proxima.engine.local.general_decoder import GeneralDecoder, RecomputeDecoder
from proxima.engine.local.local_engine import Local, LocalEngine, make_decoder
from proxima.engine.protocol import EngineSetup
from proxima.model.adapters.lora import Lora, merge_adapter
from proxima.model.pretrained import LoadedModel
from tests.engine.helpers import behavior, requests, rows_of, run, scores
from tests.engine.test_kept_prefixes import first_turns, next_turns
from tests.engine.test_local import wide
from tests.model.adapters import with_adapter
from tests.model.families import make
from tests.model.rows import ids, loaded, plain_logits

BITS = {"int8": 127, "int4": 7, "int3": 3}  # largest integer
CLASSES = {
    "fast": (FastDecoder, PerturbedFastDecoder),
    "general": (GeneralDecoder, PerturbedGeneralDecoder),
    "recompute": (RecomputeDecoder, PerturbedRecomputeDecoder),
}


def rounded(model: LoadedModel, weights: str) -> LoadedModel:
    """The model with the weights of its blocks' linear layers rounded, one output channel at a time."""
    rounded = copy.deepcopy(model)
    blocks = rounded.model.transformer.h if hasattr(rounded.model, "transformer") else rounded.model.model.layers
    for module in blocks.modules():
        if isinstance(module, nn.Linear):
            _round_channels(module.weight.data, BITS[weights])
        elif type(module).__name__ == "Conv1D":  # [in, out]
            _round_channels(module.weight.data.T, BITS[weights])
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):  # [experts, out, in]
            for experts in (module.gate_up_proj, module.down_proj):
                for expert in experts.data:
                    _round_channels(expert, BITS[weights])
    return rounded


def _round_channels(weight: torch.Tensor, most: int) -> None:
    for channel in weight:
        values = channel.numpy()
        scale = np.abs(values).max() / np.float32(most)
        channel.copy_(torch.from_numpy(np.rint(values / scale) * scale))


def perturbed(model: LoadedModel, decoder: str = "auto", seed: int = 0, **settings) -> LocalEngine:
    spec = Local(**{"slots": 8, "dtype": "float32", "decoder": decoder} | settings)
    return spec.build(replace(EngineSetup.of(model), seed=seed))


def test_rounding_by_hand():
    """int3: integers from -3 to 3; the scale of a channel is a third of its largest absolute value."""
    weight = torch.tensor([[3.0, -1.5, 0.72, 2.5], [0.0, 0.0, 0.0, 0.0], [-0.75, 0.2, 0.1, 0.375]])
    expected = torch.tensor([[3.0, -2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-0.75, 0.25, 0.0, 0.5]])
    assert torch.equal(fake_quantized(weight, 3), expected)
    assert torch.equal(fake_quantized(weight.T.contiguous(), 3, axis=0), expected.T)
    assert torch.equal(fake_quantized(weight.bfloat16(), 3), expected.bfloat16())
    assert fake_quantized(weight.bfloat16(), 3).dtype == torch.bfloat16
    four, eight = torch.tensor([[7.0, -2.5, 3.5, 0.4]]), torch.tensor([[127.0, -63.5, 0.5, 0.6]])
    assert fake_quantized(four, 4).tolist() == [[7.0, -2.0, 4.0, 0.0]]
    assert fake_quantized(eight, 8).tolist() == [[127.0, -64.0, 0.0, 1.0]]
    assert fake_quantized(weight, None) is weight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "decoder", "dtype"),
    [
        ("llama", "fast", torch.bfloat16),
        ("qwen2", "fast", torch.float32),
        ("qwen2", "general", torch.bfloat16),
        ("gpt2", "general", torch.float32),
        ("gpt2", "recompute", torch.bfloat16),
    ],
)
def test_a_decoder_with_rounded_weights_is_that_of_a_rounded_model(kind, decoder, dtype):
    """At the start, and with new weights; in bfloat16 the weights of the trainer are rounded, not those of the copy."""

    def logits(decoder):
        return decoder.logits(decoder.prefill([ids(6, 1), ids(3, 2)])[0])

    plain, own = CLASSES[decoder]
    ours = own(Perturbation(bits=4), loaded(kind).model, dtype)
    before = logits(ours)
    assert torch.equal(before, logits(plain(rounded(loaded(kind), "int4").model, dtype)))
    assert not torch.allclose(before, logits(plain(loaded(kind).model, dtype)), atol=0.05)
    ours.load(loaded(kind, seed=1).model)
    assert torch.equal(logits(ours), logits(plain(rounded(loaded(kind, seed=1), "int4").model, dtype)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3-MoE", "Qwen3-Next", "Mixtral", "Phi3", "Mamba"])
def test_which_weights_are_rounded(family):
    """Experts and projections; no router, gate of a shared expert, norm, bias, embedding or output head."""
    loaded_model = make(family)
    model = loaded_model.model
    decoder = make_decoder(loaded_model, Local(dtype="float32", decoder="general", weights="int3"))
    original = dict(model.named_parameters())
    changed = {name for name, own in decoder.model.named_parameters() if not torch.equal(own, original[name])}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    experts = {name for name in original if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    kept = {"lm_head.weight", *(name for name in linear if name.endswith("shared_expert_gate.weight"))}
    assert changed == linear - kept | experts and changed
    assert (family == "Qwen3-Next") == (len(kept) > 1)


@pytest.mark.parametrize(("transposed", "axis"), [(False, 2), (True, 1)])
def test_experts_may_be_stored_with_the_inputs_first(transposed, axis):
    """As those of gpt-oss are."""
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.gate_up_proj, model.experts.is_transposed = nn.Parameter(torch.zeros(2, 4, 6)), transposed
    assert _input_axes(model, nn.Linear(4, 9)) == {"experts.gate_up_proj": axis, "experts.down_proj": axis}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "decoder", "settings"),
    [
        (lambda: loaded("qwen2"), "fast", {"weights": "int8", "top_k_log_probs": 3}),
        (lambda: loaded("gpt2"), "general", {"weights": "int4", "sampling_mask": True}),
        (lambda: wide("llama"), "fast", {"weights": "int4", "dtype": "bfloat16"}),  # compiled kernels, if it has any
        (lambda: make("Qwen3-MoE"), "general", {"weights": "int3", "routed_experts": True}),
    ],
)
def test_the_engine_is_that_of_a_rounded_model(model, decoder, settings):
    """Completions and scores, to the bit; also with the turns that continue kept prefixes."""
    model = model()
    rest = {name: value for name, value in settings.items() if name != "weights"}
    plain = perturbed(rounded(model, settings["weights"]), decoder, **rest)
    asked = first_turns(4, 3, max_tokens=12)
    expected = run(plain, asked)
    local = perturbed(model, decoder, **settings)
    assert run(local, asked) == expected
    assert run(local, next_turns(asked, expected)) == run(plain, next_turns(asked, expected))
    assert torch.equal(scores(local, asked, expected), scores(plain, asked, expected))


@pytest.mark.slow
def test_adapters_are_merged_before_they_are_rounded(tiny_model):
    model = with_adapter(tiny_model("llama"), Lora(rank=4, alpha=8))
    merged = copy.deepcopy(model)
    merge_adapter(merged.model)
    asked = requests(3, 2, max_tokens=10)
    for decoder in ("fast", "general"):
        assert run(perturbed(model, decoder, weights="int4"), asked) == run(
            perturbed(rounded(merged, "int4"), decoder), asked
        )


# ---- noise -----------------------------------------------------------------------------------------------------------


def bias_of(engine: LocalEngine) -> torch.Tensor:
    """[V]: what is added to logits that are all 0."""
    decoder = engine.scheduler.decoder
    decoder.head = Matrix(torch.zeros(259, 32), None, torch.float32)
    return decoder.logits(torch.zeros(1, 32))[0]


def test_the_bias_is_constant_of_the_given_size_and_that_of_the_seed():
    first, again, other = (bias_of(perturbed(loaded("llama"), noise=0.05, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.allclose(bias_of(perturbed(loaded("llama"), noise=0.1, seed=3)), 2 * first)
    assert torch.equal(first, bias_of(perturbed(loaded("llama"), "general", noise=0.05, seed=3)))
    alone = LocalEngine(loaded("llama"), Local(slots=8, dtype="float32", noise=0.05))
    assert torch.equal(bias_of(alone), bias_of(perturbed(loaded("llama"), noise=0.05))), "seed 0"
    assert abs(float(first.std()) - 0.05) < 0.006 and abs(float(first.mean())) < 0.01
    assert torch.equal(first, 0.05 * torch.from_numpy(normals(259, LOGIT_BIAS, 3)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "decoder", "temperature"), [("llama", "fast", 1.0), ("gpt2", "general", 0.5)])
def test_log_probs_are_those_of_the_biased_logits(kind, decoder, temperature):
    """log mu = log softmax((z + b) / T), z by Hugging Face's forward pass; what is sampled, reported and scored."""
    model, asked = loaded(kind), requests(3, 4, temperature=temperature)
    engine = perturbed(model, decoder, noise=1.0, seed=5)
    given = run(engine, asked)
    bias = torch.from_numpy(normals(259, LOGIT_BIAS, 5))
    expected = []
    for row in rows_of(asked, given):
        with torch.no_grad():
            log_prob = (plain_logits(model.model, row) + bias / temperature).log_softmax(1)
        expected.append(log_prob.gather(1, torch.tensor(row.tokens, dtype=torch.long)[:, None])[:, 0])
    torch.testing.assert_close(behavior(given), torch.cat(expected), rtol=0, atol=2e-5)
    assert [c.tokens.tolist() for c in given] != [c.tokens.tolist() for c in run(perturbed(model, decoder), asked)]
    torch.testing.assert_close(scores(engine, asked, given), behavior(given), rtol=0, atol=2e-5)


def test_a_bias_below_the_steps_of_bfloat16_is_not_lost():
    """Logits of about 64, whose bfloat16 neighbours are .25 to .5 apart."""
    decoder = perturbed(loaded("llama"), noise=0.01, dtype="bfloat16").scheduler.decoder
    decoder.head = Matrix(torch.full((259, 32), 2.0), None, torch.bfloat16)
    logits = decoder.logits(torch.ones(1, 32, dtype=torch.bfloat16))[0]
    assert logits.dtype == torch.float32 and abs(float((logits - 64).std()) - 0.01) < 0.002


def test_the_settings_in_words():
    assert Local().mismatch == "" and Local(weights="int4").mismatch == "engine.weights=int4"
    assert Local(weights="int8", noise=0.05).mismatch == "engine.weights=int8 and engine.noise=0.05"
