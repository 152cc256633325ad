import pytest

from proxima.config.sections.model_section import ModelConfig
from proxima_plan.devices import device_kinds
from proxima_plan.memory import largest_micro_batch, trainer_memory
from proxima_plan.model_size import known_models

from .plans import LOAD, changed, planned

KNOWN = known_models()
SPEC = ModelConfig(path="qwen3-30b-a3b", gradient_checkpointing=True)


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


def test_devices_of_an_engine_beyond_the_key_heads_cache_the_same():
    """Four key heads: a device of eight keeps as much for a completion as one of four, and half of one of two."""
    kept = {}
    for size in (2, 4, 8):
        memory = planned(engines=32 // size, each=size).memory
        kept[size] = memory.engine["KV cache"] / memory.slots
    assert kept[2] == pytest.approx(2 * kept[4]) and kept[8] == pytest.approx(kept[4])
