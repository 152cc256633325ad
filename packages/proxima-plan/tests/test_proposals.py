import shlex
from dataclasses import replace

import pytest

from proxima.config.resolution import resolve
from proxima.config.validate import check, to_do
from proxima.data import UserError
from proxima.model.parallel.shard import check_split
from proxima_plan.devices import read_devices
from proxima_plan.forecast import PlannedRecipe, plan_recipe
from proxima_plan.proposals import SHARES, fastest, proposals, remedies, words_of

RECIPE = "qwen3_30b_cppo"


@pytest.mark.slow
def test_the_words_give_the_plan():
    """Each proposal can be pasted, is accepted, and is planned with the seconds it was ranked by."""
    (devices,) = read_devices("16xH100-80G")
    recipe = resolve(RECIPE, root=None)
    result = proposals(recipe, devices)
    synchronous = [plan.seconds for plan in result if not plan.load.lag]
    assert synchronous == sorted(synchronous) and len(result) > 2
    for proposal in result:
        words = shlex.split(" ".join(words_of(proposal, recipe)))
        resolved = resolve(RECIPE, words, root=None)
        left = to_do(resolved)
        assert not [problem for problem in check(resolved) if problem not in left and "vllm" not in str(problem)]
        again = plan_recipe(resolved, devices)
        assert again.layout == proposal.layout
        assert again.seconds == pytest.approx(proposal.seconds)
        assert again.memory.fits
    assert result[-1].load.lag == 1 and result[-1].seconds < synchronous[0]


def test_devices_that_are_too_few():
    with pytest.raises(UserError, match=r"no layout of Qwen/Qwen3-30B-A3B-Base fits 2xL4-24G; take more"):
        proposals(resolve(RECIPE, root=None), read_devices("2xL4-24G")[0])


LORA = ["model.lora={rank: 16}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "adapter"),
    [("Qwen/Qwen3-30B-A3B", []), ("Qwen/Qwen3-30B-A3B", LORA), ("Qwen/Qwen2.5-7B", LORA), ("Qwen/Qwen2.5-3B", [])],
)
def test_nothing_is_proposed_that_the_code_refuses(model, adapter):
    """Heads, experts and columns of 24 devices, of a mixture and of models with 28 and with 2 key and value heads."""
    (devices,) = read_devices("24xH100-80G")
    resolved = resolve(RECIPE, [f"model.path={model}", *adapter], root=None)
    planned = PlannedRecipe.of(resolved, devices)
    for load, shares in ((planned.load, [0.0]), (replace(planned.load, lag=1), [0.0, *SHARES])):
        layouts = [plan.layout for plan in fastest(planned, load, shares)]
        assert layouts
        for layout in layouts:
            tensor, expert = layout.sharding.tensor_parallel, layout.sharding.expert_parallel
            assert tensor == 1 or not (adapter or (expert > 1 and "A3B" in model))
            assert planned.config.num_attention_heads % layout.engine_devices == 0
            assert planned.config.num_key_value_heads % tensor == 0
            check_split(planned.config, None, replace(layout.sharding, context_parallel=1), adapters=bool(adapter))


SHARDED = {
    "placement": "torchrun",
    "placement.sharding.param_dtype": "bfloat16",
    "model.gradient_checkpointing": "true",
}
RECOMPUTED, WHOLE = "model.gradient_checkpointing", "placement.sharding.kind"
MICRO = {"train.tokens_per_micro_batch": "4096"}
FULL, EIGHT_BITS = "placement.sharding.kind=full", "train.optimizer.kind=adamw_8bit"


@pytest.mark.parametrize(
    ("model", "devices", "changed", "expected"),
    [
        ("7B", "8xL4-24G", {RECOMPUTED: "false", "train.examples_per_step": "128", **MICRO}, [f"{RECOMPUTED}=true"]),
        ("7B", "8xL4-24G", {WHOLE: "replicate"}, [FULL]),
        ("14B", "8xL4-24G", {}, [EIGHT_BITS]),
        ("14B", "8xL4-24G", {WHOLE: "replicate", RECOMPUTED: "false"}, [f"{RECOMPUTED}=true", FULL, EIGHT_BITS]),
        ("14B", "4xL4-24G", {}, ["placement.sharding.offload=true"]),
        ("14B", "L4-24G", {}, None),
    ],
)
def test_a_remedy_is_the_first_that_leaves_room(model, devices, changed, expected):
    """Recomputed layers, sharding, 8 bits, states in host memory; a twentieth of the device stays free."""
    (asked,) = read_devices(devices)
    words = SHARDED | {"model.path": f"Qwen/Qwen2.5-{model}"} | changed
    overrides = [f"{name}={value}" for name, value in words.items()]
    resolved = resolve("classic/sft", overrides, root=None)
    assert not plan_recipe(resolved, asked).memory.fits
    remedy = remedies(resolved, overrides, asked)
    if expected is None:
        assert remedy is None
        return
    assert remedy is not None
    proposal, plan = remedy
    assert proposal == expected
    assert plan.memory.needed <= 0.95 * plan.memory.memory
