from dataclasses import replace
from types import SimpleNamespace

import pytest

from proxima.config.sections.model import ModelConfig
from proxima.model.parallel.sharding import Sharding
from proxima.training.optimizer_muon import Muon
from proxima_plan import memory
from proxima_plan.devices import device_kinds
from proxima_plan.layout import DeviceLayout
from proxima_plan.memory import _activations, _logits, _moments, _of_layer, largest_micro_batch, trainer_memory
from proxima_plan.model_size import ModelFacts, known_models, model_facts

from .plans import LOAD, changed, planned, small_mixture

KNOWN = known_models()
SPEC = ModelConfig(path="qwen3-30b-a3b", compute_dtype="bfloat16", gradient_checkpointing=True)


def test_states_are_split_over_all_ranks_whatever_the_groups():
    for split in ({}, {"tensor_parallel": 4}, {"expert_parallel": 8}, {"context_parallel": 2}):
        memory = planned(**split).memory
        assert memory.trainer["weights"] == 30_532_122_624 * 4 // 32
        assert memory.trainer["optimizer"] == 2 * memory.trainer["weights"]
        assert memory.fits and memory.slots == 128


def test_what_each_dimension_saves():
    def kinds(**split):
        return trainer_memory(SPEC, KNOWN["qwen3-30b-a3b"], planned(**split).layout, LOAD)[0]["activations"]

    whole = kinds()
    assert kinds(expert_parallel=8) < whole and kinds(tensor_parallel=8) < 0.6 * whole
    assert kinds(context_parallel=2) < whole


def test_the_local_part_of_a_layer():
    model = KNOWN["qwen3-30b-a3b"]
    layout = planned(expert_parallel=8, tensor_parallel=2).layout
    local = layout.local(model)
    experts = 28_991_029_248 // 48
    assert local.layer == pytest.approx((model.layer - experts) / 2 + experts / 16, rel=1e-6)
    assert local.query_width == 2048
    ends = model.parameters - 48 * model.layer
    assert local.parameters == pytest.approx(48 * local.layer + ends / 2, rel=1e-6)


def test_the_largest_micro_batch_is_one_that_fits():
    model, layout = KNOWN["qwen3-30b-a3b"], planned().layout
    kinds = device_kinds()
    sizes = [largest_micro_batch(SPEC, model, layout, LOAD, kinds[name]) for name in ("H100-80G", "H200-141G")]
    assert 4096 < sizes[0] < sizes[1] and sizes[0] % 1024 == 0
    alone = planned(devices="1xL4-24G", engines=1, each=1)
    assert alone.micro_batch == 0 and not alone.memory.fits and alone.memory.slots == 0
    assert changed(shared=True).prompt_tokens == 150 / 32


@pytest.mark.parametrize(("most", "found"), [(10_240, 10_240), (10_239, 9216), (4096, 4096), (1023, 0)])
def test_the_largest_micro_batch_is_a_multiple_of_1024(most, found, monkeypatch):
    """Or the longest sequence, of 150 and 3,946 tokens, if that alone fits."""
    roomy = lambda spec, model, layout, load, device: SimpleNamespace(roomy=load.micro_tokens <= most)  # noqa: E731
    monkeypatch.setattr(memory, "device_memory", roomy)
    assert largest_micro_batch(SPEC, SMALL, DeviceLayout(), LOAD, device_kinds()["H100-80G"]) == found


def test_devices_of_an_engine_beyond_the_key_heads_cache_the_same():
    """Four key heads: a device of eight keeps as much for a completion as one of four, and half of one of two."""
    kept = {}
    for size in (2, 4, 8):
        memory = planned(engines=32 // size, each=size).memory
        kept[size] = memory.engine["KV cache"] / memory.slots
    assert kept[2] == pytest.approx(2 * kept[4]) and kept[8] == pytest.approx(kept[4])


WIDTHS = {"hidden": 8, "intermediate": 16, "vocabulary": 32, "kv_width": 4, "query_width": 8, "heads": 2, "kv_heads": 1}
SMALL = ModelFacts(parameters=1000, layers=2, layer=300, **WIDTHS)
BF16 = ModelConfig(path="small", compute_dtype="bfloat16")


def test_what_a_layer_keeps_by_hand():
    """Of three tokens, with two bytes of a product. Norms 2 (4 + 4) 8; rounded inputs 5 · 2 · 8; attention as much;
    gate and up 4 · 2 · 16: 416 bytes. Norms of heads (4 + 2) (8 + 4); two experts 2 · 2 · 2 · 8."""
    assert _of_layer(BF16, SMALL, 3, 4, fused=False) == 3 * 416
    assert _of_layer(BF16, replace(SMALL, normed=True, experts=2), 3, 4, fused=False) == 3 * (416 + 72 + 64)
    assert _of_layer(BF16, SMALL, 3, 2, fused=False) == 3 * (2 * 6 * 8 + 2 * 2 * 8 + 80 + 128)  # nothing is rounded
    assert _of_layer(BF16, SMALL, 3, 4, fused=True) == 3 * (2 * 6 * 8 + 2 * (2 * 8 + 2 * 4 + 2 * 16))


def test_what_the_logits_take_by_hand():
    """Three tokens of 32 logits beside a head of 256 weights: the chunk with its softmax, or its gradient beside that
    of the head, and the rounded head if products round it; over several chunks the head's is summed in float32."""
    assert _logits(BF16, SMALL, 3, 4, 2) == 512 + 96 * 6 + 256 * 6
    assert _logits(BF16, SMALL, 3, 2, 2) == 96 * 6 + 256 * 4
    assert _logits(replace(BF16, log_prob_chunk=2), SMALL, 3, 2, 2) == 64 * 2 + 256 * 6
    assert _logits(BF16, replace(SMALL, hidden=1), 3, 2, 2) == 96 * 10  # the head is small


@pytest.mark.parametrize(("again", "whole", "layers"), [(True, 4 * 400, 3), (False, 4 * 1000, 1)])
def test_what_a_sharded_update_keeps_by_hand(again, whole, layers):
    """Three tokens on four ranks. Two layers and four states of 3 · 4 · 8 bytes; rounded weights, 2 · 2 · 300; gathered
    weights, of the ends or all. In the backward pass of a layer: gradients of 3 · (2 · 2 · 16 + 2 · 4 · 8) and of the
    head, 4 · 256; gathered layers of 4 · 300, three at once or one; its sums, 8 · 300, beyond what it kept."""
    layout = DeviceLayout(4, Sharding(reshard_after_forward=again))
    kept = 2 * 3 * 416 + 4 * 96 + 1200 + whole
    passing = 3 * 128 + 1024 + layers * 1200 + 2400 - 3 * 416
    assert _activations(BF16, SMALL, layout, 3, fused=False) == kept + passing


def test_the_state_of_an_optimizer_by_hand():
    assert _moments(BF16, SMALL, None) == 8 * 1000
    assert _moments(BF16, SMALL, Muon()) == 4 * 600 + 8 * 400
    mixture = replace(SMALL, experts=2)  # Muon has queries, keys, values and output: 2 · 8 (8 + 4) in each layer
    assert _moments(BF16, mixture, Muon()) == 4 * 384 + 8 * 616


def test_the_size_of_a_mixture_by_hand(tmp_path):
    """A layer: 64 + 32 + 32 + 64 of attention, norms of 4 + 4 and 8 + 8, a router of 32, four experts of 144."""
    facts = model_facts(small_mixture(tmp_path))
    assert (facts.layer, facts.parameters) == (824, 2 * 824 + 2 * 128 + 8)
    assert facts.active == facts.parameters - 2 * 2 * 144  # two of four experts in each of two layers
    assert (facts.experts, facts.all_experts, facts.intermediate, facts.normed) == (2, 4, 12, True)
    assert (facts.kv_width, facts.query_width, facts.heads, facts.kv_heads) == (4, 8, 2, 1)
