"""An engine that differs from the trainer on purpose: with rounded weights it is the plain engine of a model whose
weights a test has rounded, to the bit; with noise its distribution is the trainer's with a bias on the logits."""

import asyncio
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from proxima.data import FieldError
from proxima.data.random import LOGIT_BIAS, normals
from proxima.engine.decoder import Matrix
from proxima.engine.fast_decoder import FastDecoder
from proxima.engine.general_decoder import GeneralDecoder, RecomputeDecoder
from proxima.engine.local import Local, LocalEngine, make_decoder
from proxima.engine.local_process import LocalProcess
from proxima.engine.perturbed_decoder import (
    PerturbedFastDecoder,
    PerturbedGeneralDecoder,
    PerturbedRecomputeDecoder,
    fake_quantized,
)
from proxima.engine.protocol import EngineSetup, ScoreRequest
from proxima.model import LoadedModel
from proxima.model.lora import Lora
from proxima.model.lora_layers import merge_adapter
from tests.engine.helpers import behavior, requests, run
from tests.engine.test_kept_prefixes import first_turns, next_turns
from tests.engine.test_local import wide
from tests.model.adapters import with_adapter
from tests.model.families import make
from tests.model.rows import ids, loaded

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
    return LocalEngine(model, Local(**{"slots": 8, "dtype": "float32", "decoder": decoder} | settings), seed=seed)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "decoder"),
    [
        *((kind, "fast") for kind in ("llama", "qwen2", "qwen3")),
        *((kind, "general") for kind in ("llama", "qwen2", "gpt2")),
        *((kind, "recompute") for kind in ("llama", "gpt2")),
    ],
)
def test_a_decoder_with_rounded_weights_is_the_plain_one_of_a_rounded_model(kind, decoder, dtype):
    """At the start, and with new weights; in bfloat16 the weights of the trainer are rounded, not those of the copy."""

    def logits(decoder):
        return decoder.logits(decoder.prefill([ids(6, 1), ids(3, 2)])[0])

    plain, own = CLASSES[decoder]
    ours = own(loaded(kind).model, dtype, bits=4, bias=None)
    before = logits(ours)
    assert torch.equal(before, logits(plain(rounded(loaded(kind), "int4").model, dtype)))
    assert not torch.allclose(before, logits(plain(loaded(kind).model, dtype)), atol=0.05)
    ours.load(loaded(kind, seed=1).model)
    assert torch.equal(logits(ours), logits(plain(rounded(loaded(kind, seed=1), "int4").model, dtype)))


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


def test_what_is_built():
    def made(kind, decoder="auto"):
        return make_decoder(loaded(kind), Local(dtype="float32", decoder=decoder, weights="int4"))

    assert type(made("llama")) is type(made("qwen3", "fast")) is PerturbedFastDecoder
    assert type(made("llama", "general")) is type(made("gpt2")) is PerturbedGeneralDecoder
    assert type(perturbed(loaded("llama")).scheduler.decoder) is FastDecoder  # neither setting: the plain one


@pytest.mark.parametrize(
    ("model", "decoder", "settings"),
    [
        (lambda: loaded("llama"), "fast", {"weights": "int8"}),
        (lambda: loaded("qwen2"), "fast", {"weights": "int3", "top_k_log_probs": 3}),
        (lambda: loaded("gpt2"), "general", {"weights": "int4", "sampling_mask": True}),
        (lambda: loaded("llama"), "fast", {"weights": "int4", "dtype": "bfloat16"}),
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
    scored = [
        ScoreRequest(prompt_tokens=r.prompt.tokens, tokens=c.tokens) for r, c in zip(asked, expected, strict=True)
    ]
    ours, theirs = (np.concatenate(asyncio.run(engine.score(scored))) for engine in (local, plain))
    assert np.array_equal(ours, theirs)


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
    assert abs(float(first.std()) - 0.05) < 0.006 and abs(float(first.mean())) < 0.01
    assert torch.equal(first, 0.05 * torch.from_numpy(normals(259, LOGIT_BIAS, 3)))


@pytest.mark.parametrize(("kind", "decoder"), [("llama", "fast"), ("gpt2", "general")])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_are_those_of_the_biased_logits(kind, decoder, temperature):
    """log mu = log softmax((z + b) / T), z by Hugging Face's forward pass; what is sampled, reported and scored."""
    model, asked = loaded(kind), requests(3, 4, temperature=temperature)
    engine = perturbed(model, decoder, noise=1.0, seed=5)
    given = run(engine, asked)
    bias = torch.from_numpy(normals(259, LOGIT_BIAS, 5))
    expected = []
    for request, completion in zip(asked, given, strict=True):
        tokens = torch.tensor([*request.prompt.tokens, *completion.tokens])
        with torch.no_grad():
            logits = model.model(tokens[None, :-1]).logits[0, len(request.prompt.tokens) - 1 :]
        log_prob = ((logits + bias) / temperature).log_softmax(1)
        expected.append(log_prob.gather(1, torch.tensor(completion.tokens.astype(np.int64))[:, None])[:, 0])
    torch.testing.assert_close(behavior(given), torch.cat(expected), rtol=0, atol=2e-5)
    assert [c.tokens.tolist() for c in given] != [c.tokens.tolist() for c in run(perturbed(model, decoder), asked)]
    pairs = zip(asked, given, strict=True)
    scored = [ScoreRequest(prompt_tokens=r.prompt.tokens, tokens=c.tokens, temperature=temperature) for r, c in pairs]
    scores = torch.from_numpy(np.concatenate(asyncio.run(engine.score(scored))))
    torch.testing.assert_close(scores, behavior(given), rtol=0, atol=2e-5)


def test_a_bias_below_the_steps_of_bfloat16_is_not_lost():
    """Logits of about 64, whose bfloat16 neighbours are .25 to .5 apart."""
    decoder = perturbed(loaded("llama"), noise=0.01, dtype="bfloat16").scheduler.decoder
    decoder.head = Matrix(torch.full((259, 32), 2.0), None, torch.bfloat16)
    logits = decoder.logits(torch.ones(1, 32, dtype=torch.bfloat16))[0]
    assert logits.dtype == torch.float32 and abs(float((logits - 64).std()) - 0.01) < 0.002


@pytest.mark.slow  # a process
def test_the_engine_in_a_process_is_the_same(warm_processes):
    asked, settings = requests(3, 4), {"slots": 8, "dtype": "float32", "weights": "int4", "noise": 0.2}
    engine = LocalProcess(**settings).build(replace(EngineSetup.of(loaded("llama")), seed=7))
    try:
        assert run(engine, asked) == run(perturbed(loaded("llama"), seed=7, **settings), asked)
    finally:
        engine.close()


def test_the_seed_of_a_run_reaches_the_engine():
    spec, setup = Local(dtype="float32", slots=8, noise=0.2), EngineSetup.of(loaded("llama"))
    first, second = (bias_of(spec.build(replace(setup, seed=seed))) for seed in (3, 4))
    assert torch.equal(first, bias_of(perturbed(loaded("llama"), noise=0.2, seed=3)))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("field", "value"),
    [("weights", "int5"), ("weights", "fp8"), ("noise", -0.1), ("noise", float("nan")), ("noise", 1e9)],
)
def test_what_is_refused(field, value):
    with pytest.raises(FieldError, match=f"{field}="):
        Local(**{field: value})


def test_the_settings_in_words():
    assert Local().mismatch == "" and Local(weights="int4").mismatch == "engine.weights=int4"
    assert Local(weights="int8", noise=0.05).mismatch == "engine.weights=int8 and engine.noise=0.05"
