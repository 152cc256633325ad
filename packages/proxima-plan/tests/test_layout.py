from contextlib import suppress
from dataclasses import replace

import pytest

from proxima.config.resolution import resolve
from proxima.data import FieldError
from proxima.model.parallel.sharding import Sharding
from proxima_plan.devices import read_devices
from proxima_plan.layout import DeviceLayout, check_model, planned_layout
from proxima_plan.model_size import known_models
from tests.recipes.shapes import SHAPES

KNOWN = known_models()

RAY = "placement={kind: ray, ranks: %d, engines: %d, %s}"


def layout(words, devices="32xH100-80G"):
    return planned_layout(resolve("qwen3_30b_cppo", words, root=None).config, read_devices(devices)[0])


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
    assert shared.split == 1, "the recipe's server has no tensor_parallel_size"
    assert str(shared) == "32 ranks (full), 8 engines of 4 devices, weights on 1 of them, on the same devices"
    for whole in (0, 4):
        assert str(replace(shared, split=whole)) == "32 ranks (full), 8 engines of 4 devices on the same devices"


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
        ("qwen2.5-7b", {"tensor_parallel": 3}, "placement.tensor_parallel", "set it to 4"),
        ("qwen2.5-7b", {"engine_devices": 8}, "placement.engines", "must divide the 28 attention heads"),
    ],
)
def test_dimensions_that_a_model_has_not(model, split, field, said):
    """Those of ranks as in `tests/model/parallel/test_refusals.py`, and those of engines."""
    config, each = KNOWN[model].config(), split.get("engine_devices", 1)
    sharding = Sharding(**{name: size for name, size in split.items() if name != "engine_devices"})
    with pytest.raises(FieldError) as raised:
        check_model(DeviceLayout(24, sharding, engine_devices=each), config, adapters=False)
    assert raised.value.field == field and said in str(raised.value)
    check_model(DeviceLayout(32), config, adapters=True)


def test_adapters_are_not_split():
    layout, config = DeviceLayout(8, Sharding(tensor_parallel=2)), KNOWN["qwen2.5-7b"].config()
    check_model(layout, config, adapters=False)
    with pytest.raises(FieldError, match="adapters"):
        check_model(layout, config, adapters=True)


@pytest.mark.parametrize("model", sorted(set(KNOWN) - {"deepseek-v3"}))
def test_a_stand_in_is_refused_what_the_model_is(model):
    """The config.json of each known model, whose shape another test has, allows the same sizes of groups."""
    own = next(
        config for path, (config, _) in SHAPES.items() if KNOWN.get(path.rpartition("/")[2].lower()) == KNOWN[model]
    )

    def refused(config, layout):
        with suppress(FieldError):
            check_model(layout, config, adapters=False)
            return ""
        return "refused"

    layouts = [
        DeviceLayout(ranks, Sharding(tensor_parallel=tensor, context_parallel=context, expert_parallel=expert))
        for ranks in (24, 64) for tensor in (1, 2, 3, 4, 8) for context in (1, 2, 8) for expert in (1, 3, 8)
    ]  # fmt: skip
    stand_in = KNOWN[model].config()
    assert [refused(stand_in, layout) for layout in layouts] == [refused(own, layout) for layout in layouts]


@pytest.mark.parametrize(
    ("ranks", "sharding", "parts"),
    [
        (16, {"kind": "full"}, 16),
        (16, {"kind": "hybrid"}, 8),
        (4, {"kind": "hybrid"}, 4),
        (16, {"kind": "replicate", "tensor_parallel": 2}, 2),
        (1, {"kind": "replicate"}, 1),
    ],
)
def test_what_weights_are_split_over(ranks, sharding, parts, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert DeviceLayout(ranks, Sharding(**sharding), 1, 1).parts == parts
