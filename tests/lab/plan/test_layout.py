import pytest

from proxima.config import resolve
from proxima.config.model_size import KNOWN
from proxima.data import FieldError
from proxima.lab.plan import DeviceLayout, planned_layout, read_devices
from proxima.lab.plan.layout import check_model
from proxima.model.parallel.sharding import Sharding

RAY = "placement={kind: ray, ranks: %d, engines: %d, %s}"


def layout(words, devices="32xH100-80G"):
    return planned_layout(resolve("qwen3_30b_cppo", words, root=None).config, read_devices(devices))


def test_where_trainer_and_engines_are():
    alone = layout([], "1xH100-80G")
    assert (alone.ranks, alone.engines, alone.colocated, alone.in_process) == (1, 1, True, True)
    ranks = layout(["placement={kind: torchrun, tensor_parallel: 2, context_parallel: 2}"])
    assert (ranks.ranks, ranks.shares, ranks.devices) == (32, 8, 32)
    beside = layout(["engine=vllm", RAY % (16, 8, "gpus_per_engine: 2, expert_parallel: 8")])
    assert (beside.devices, beside.engine_devices, beside.sharding.expert_parallel) == (32, 2, 8)
    assert not beside.colocated and not beside.in_process
    shared = layout(["engine=vllm", RAY % (32, 8, "colocate: true")])
    assert (shared.devices, shared.engine_devices, shared.colocated) == (32, 4, True)
    assert str(shared) == "32 ranks (full), 8 engines of 4 devices on the same devices"


@pytest.mark.parametrize(
    "words, field, said",
    [
        (["placement={kind: torchrun, tensor_parallel: 3}"], "placement.tensor_parallel", "set it to 4"),
        (["engine=vllm", RAY % (32, 8, "gpus_per_engine: 1")], "placement.ranks", "--devices 40xH100-80G"),
    ],
)
def test_layouts_that_do_not_fit_the_devices(words, field, said):
    with pytest.raises(FieldError) as raised:
        layout(words)
    assert raised.value.field == field and said in str(raised.value)


@pytest.mark.parametrize(
    "model, split, field, said",
    [
        ("qwen3-4b", {"expert_parallel": 2}, "placement.expert_parallel", "set it to 1"),
        ("qwen3-30b-a3b", {"expert_parallel": 24}, "placement.expert_parallel", "set it to 32"),
        ("qwen2.5-7b", {"tensor_parallel": 3}, "placement.tensor_parallel", "set it to 2"),
    ],
)
def test_dimensions_that_a_model_has_not(model, split, field, said):
    with pytest.raises(FieldError) as raised:
        check_model(DeviceLayout(24, Sharding(**split)), KNOWN[model])
    assert raised.value.field == field and said in str(raised.value)
    check_model(DeviceLayout(24, Sharding(tensor_parallel=4)), KNOWN[model])
