"""Decoders: fast, general and recomputing give the same hidden states, and all of them the trainer's log-probs."""

import pytest
import torch

from proxima.engine.local.fast_decoder import FastDecoder, supports
from proxima.engine.local.general_decoder import GeneralDecoder, RecomputeDecoder
from proxima.engine.local.kv_cache import KVCache
from proxima.engine.local.local_engine import Local, LocalEngine, make_decoder
from tests.engine.helpers import behavior, engine, requests, run, trainer_log_prob
from tests.model.rows import ids, loaded
from tests.tiny import KINDS

FAST = [kind for kind in KINDS if kind != "gpt2"]
PAIRS = [(kind, "fast") for kind in FAST] + [(kind, "general") for kind in KINDS]
PAIRS += [("llama", "recompute"), ("gpt2", "recompute")]
CLASSES = {"fast": FastDecoder, "general": GeneralDecoder, "recompute": RecomputeDecoder}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "decoder"), [("qwen2", "fast"), ("qwen3", "general"), ("gpt2", "general")])
def test_log_probs_equal_the_trainers_forward_in_bf16(kind, decoder):
    """Both round to eight bits at each product, in other orders: apart by rounding alone, and nearer to each other than
    to float32."""
    asked = requests(temperature=0.8)
    given = run(engine(kind, decoder, dtype=torch.bfloat16), asked)
    apart = (behavior(given) - trainer_log_prob(kind, asked, given, dtype=torch.bfloat16)).abs()
    rounding = (trainer_log_prob(kind, asked, given) - trainer_log_prob(kind, asked, given, dtype=torch.bfloat16)).abs()
    assert apart.mean() < 0.02 and apart.max() < 0.15
    assert apart.mean() < 1.1 * rounding.mean()


@pytest.mark.parametrize(
    ("kind", "decoder", "dtype"),
    [
        *((*pair, torch.float32) for pair in PAIRS),
        *((*pair, torch.bfloat16) for pair in (("llama", "fast"), ("qwen3", "general"), ("gpt2", "recompute"))),
    ],
)
def test_every_weight_is_loaded_and_copied(kind, decoder, dtype):
    """A decoder of other weights, loaded with these, is the decoder of these, and no later change of the model is seen:
    a weight that stays behind shows in the logits."""

    def logits(decoder):
        return decoder.logits(decoder.prefill([ids(6, 1), ids(3, 2)])[0])

    model = loaded(kind).model
    built, given = CLASSES[decoder](model, dtype), CLASSES[decoder](loaded(kind, seed=1).model, dtype)
    expected, before = logits(built), logits(given)
    given.load(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert torch.equal(logits(built), expected) and torch.equal(logits(given), expected)
    assert not torch.allclose(before, expected, atol=0.1)


@pytest.mark.parametrize(("kind", "decoder"), [("qwen2", "fast"), ("qwen3", "general"), ("gpt2", "recompute")])
def test_weights_in_bfloat16_are_computed_with_in_float32(kind, decoder):
    """`model.dtype: bfloat16` beside `engine.dtype: float32`: the same as of a model that holds them in float32."""
    model = loaded(kind).model.bfloat16()
    prompts = [ids(6, 1), ids(3, 2)]

    def logits(model):
        decoder_of = CLASSES[decoder](model, torch.float32)
        return decoder_of.logits(decoder_of.prefill(prompts)[0])

    given = logits(model)
    assert torch.equal(given, logits(model.float()))


def test_equal_sequences_run_once():
    """As the rows of a step that are not in use are."""
    decoder, ran = RecomputeDecoder(loaded("llama").model, torch.float32), []
    decoder.backbone.register_forward_hook(lambda *_: ran.append(1))
    states, _ = decoder.prefill([ids(3, 2), ids(6, 1), ids(3, 2), ids(3, 2)])
    assert len(ran) == 2
    alone = [decoder.prefill([ids(*each)])[0][0] for each in ((3, 2), (6, 1), (3, 2), (3, 2))]
    assert torch.equal(states, torch.stack(alone))


def test_what_has_a_fast_path():
    made = [type(make_decoder(loaded(kind), Local())) for kind in KINDS]
    assert made == [FastDecoder] * 3 + [GeneralDecoder]
    assert type(make_decoder(loaded("llama"), Local(decoder="general"))) is GeneralDecoder
    assert supports(loaded("gpt2").model) == "family gpt2 has no fast path"
    model = loaded("llama").model
    model.config.hidden_act = "gelu"
    assert supports(model) == "activation gelu has no fast path"
    model = loaded("llama").model
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert supports(model) == "rope type dynamic has no fast path"
    with pytest.raises(ValueError, match="engine.decoder='fast': family gpt2 has no fast path; use auto or general"):
        LocalEngine(loaded("gpt2"), Local(decoder="fast"))


def test_the_cache_grows_and_keeps_what_it_holds():
    cache = KVCache(2, 3, (2, 2, 4), torch.float32, torch.device("cpu"))
    assert cache.capacity == 0
    cache.reserve(5)
    assert cache.capacity == 64
    kv = torch.randn(2, 2, 2, 5, 4)
    cache.put(torch.tensor([0, 2]), kv)
    cache.reserve(65)
    assert cache.capacity == 128
    for layer in range(2):
        for slot in (0, 2):
            key, value = (x[slot, :, :5] for x in cache.read(layer, 3, 5))
            assert torch.equal(key, kv[layer, 0]) and torch.equal(value, kv[layer, 1])
    cache.reserve(3)
    assert cache.capacity == 128
