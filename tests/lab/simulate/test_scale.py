"""Runs on more and more devices: the trend of published figures, and what binds."""

from dataclasses import replace
from functools import cache

import pytest

from proxima.config import resolve
from proxima.data import FieldError, UserError
from proxima.lab.plan.devices import Devices, device_kinds
from proxima.lab.plan.layout import DeviceLayout
from proxima.lab.plan.step_plan import plan_recipe
from proxima.lab.simulate.distributions import Constant, LogNormal
from proxima.lab.simulate.planned_times import planned_times, with_lengths
from proxima.lab.simulate.scale import LONGEST, ScaledRun, lasting_cause, simulate_plan, simulate_scale, stops_paying
from proxima.lab.simulate.times import Times
from proxima.model.parallel.sharding import Sharding

H20 = device_kinds()["H20-96G"]
LENGTH = Times(length=LogNormal(2080.0), prompt_length=150)
# a sixteenth of a step of verl's Qwen2.5-Math-7B, which has 512 prompts, for a sixteenth of its devices
RECIPE = {
    "model": {"path": "Qwen/Qwen2.5-Math-7B", "max_length": 28_822, "gradient_checkpointing": True},
    "task": "arithmetic",
    "reward": "number",
    "algorithm": "grpo",
    "engine": {"kind": "local_process", "slots": 64},
    "sampling": {"max_tokens": 28_672},
    "train": {"steps": 4, "prompts_per_step": 32, "completions_per_prompt": 16, "tokens_per_micro_batch": 61_440},
}
HYBRID = Sharding(kind="hybrid", param_dtype="bfloat16")


@cache
def recipe(*overrides):
    return resolve(RECIPE, overrides)


def run_on(count, *, beside=0, size=1, lag=0, steps=2):
    layout = DeviceLayout(
        count - beside, HYBRID, engines=(beside or count) // size, engine_devices=size, colocated=not beside
    )
    plan = plan_recipe(recipe(), Devices(H20, count), layout=layout, mean=2080.0)
    load, times = with_lengths(replace(plan.load, lag=lag), LENGTH, ["prompt_length"])
    return simulate_plan(recipe().config, replace(plan, load=load), times, ["prompt_length"], lag, steps)


def test_past_some_devices_only_overlap_helps():
    """verl, 32 / 64 / 128 devices: synchronous 790 / 365 / 356 s, asynchronous 295 / 189 / 151 s."""
    sync = {count: run_on(count) for count in (2, 4, 8, 32)}
    first, second, third = (
        sync[n].step_seconds / sync[2 * n].step_seconds if n < 8 else sync[8].step_seconds / sync[32].step_seconds
        for n in (2, 4, 8)
    )
    assert 1.3 < first < 2.2
    assert first > second
    assert third < 2.2  # for four times the devices
    assert sync[2].spent[LONGEST] < sync[8].spent[LONGEST] < sync[32].spent[LONGEST]
    assert sync[32].binds == LONGEST
    beside = run_on(8, beside=4, lag=1)
    assert beside.spent[LONGEST] < 0.5 * sync[8].spent[LONGEST]
    assert beside.step_seconds < sync[8].step_seconds


def test_more_devices_never_take_longer_and_the_causes_are_all_of_a_step():
    """Constant lengths, so that no draw of a longer one is in the way."""
    times = replace(LENGTH, length=Constant(300))
    settings = recipe("train.prompts_per_step=16")
    pairs = simulate_scale(settings, H20, [8, 16, 32], times, given=["prompt_length"], steps=2)
    for runs in zip(*pairs, strict=True):
        seconds = [run.step_seconds for run in runs]
        assert seconds == sorted(seconds, reverse=True)
        for run in runs:
            assert sum(run.spent.values()) == pytest.approx(1.0)
            assert run.tokens_per_second * run.step_seconds == pytest.approx(256 * 300)
            assert run.layout is not None and run.layout.devices <= run.devices
    assert [sync.layout.colocated for sync, _ in pairs] == [True] * 3
    assert [beside.layout.colocated for _, beside in pairs] == [False] * 3


def test_devices_that_are_too_few_say_so():
    large = recipe("model.path=Qwen/Qwen2.5-32B")
    ((sync, beside),) = simulate_scale(large, H20, [2], LENGTH, given=["prompt_length"])
    assert sync.refused.startswith("needs ") and sync.refused.endswith("GiB a device, which has 95")
    assert beside.refused and beside.binds == beside.refused
    grouped = recipe("placement={kind: torchrun, context_parallel: 4}")
    ((sync, _),) = simulate_scale(grouped, H20, [2], LENGTH, given=["prompt_length"])
    assert sync.refused == "too few for the groups of the placement"


def test_a_recipe_that_can_not_be_planned_is_refused():
    with pytest.raises(UserError, match="the size of no-such-model is not known"):
        simulate_scale(recipe("model.path=no-such-model"), H20, [8], LENGTH)
    with pytest.raises(FieldError, match="tensor_parallel"):
        simulate_scale(recipe("placement={kind: torchrun, tensor_parallel: 5}"), H20, [40], LENGTH)


def _run(devices, speed, **spent):
    return ScaledRun(devices=devices, lag=0, tokens_per_second=speed, step_seconds=100 / speed, spent=spent)


def test_where_devices_stop_paying():
    runs = [_run(8, 1.0), _run(16, 1.2), _run(32, 2.0), _run(64, 2.4), _run(256, 2.9)]
    assert stops_paying(runs) is runs[2]  # 8 to 16 is a dip, after which more devices pay again
    assert stops_paying(runs[:3]) is None
    assert stops_paying([runs[0], _run(16, 2.0), _run(64, 3.3)]).devices == 16  # 1.28 for each doubling
    assert stops_paying(runs[:1]) is None


def test_the_cause_is_what_no_number_of_devices_shortens():
    run, larger = _run(8, 1.0, a=0.6, b=0.4), _run(16, 1.25, a=0.55, b=0.45)
    assert lasting_cause(run, larger) == "b"  # a: 60 to 44 s, 28 s of it for ever; b: 40 to 36 s, 32 s


def test_the_times_are_those_of_the_plan():
    plan = plan_recipe(recipe(), Devices(H20, 8), layout=DeviceLayout(8, HYBRID, engines=8), mean=2080.0)
    times = planned_times(plan, replace(LENGTH, other=7.0), ["other"])
    assert times.other == 7.0
    assert planned_times(plan, LENGTH, []).other == plan.times.rates.step
    assert times.decode_step(16) == plan.times.decode_step(16, times.context)[0]
    assert 150 + 2080 / 2 < times.context < 150 + 2080  # a long completion runs longer, so more of its tokens are there
    assert times.publish == plan.times.publish().seconds
    lengths = [2000] * 512
    whole = [2000 + plan.load.prompt_tokens] * 512
    expected = plan.times.update(whole).seconds + plan.load.forwards * plan.times.forward(whole).seconds
    assert times.update_step(lengths) == pytest.approx(expected)
    several = planned_times(replace(plan, load=replace(plan.load, updates=8, passes=2)), LENGTH, [])
    assert several.update_step(lengths) > 2 * times.update_step(lengths) * 0.9


def test_lengths_that_nobody_gave_are_those_of_the_plan():
    plan = plan_recipe(recipe(), Devices(H20, 8), layout=DeviceLayout(8, HYBRID, engines=8), mean=2080.0)
    load, times = with_lengths(plan.load, Times(), [])
    assert load == plan.load and times.prompt_length == load.prompt
    drawn = [min(load.longest, times.length.draw(0, uid, 0)) for uid in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(load.mean, rel=0.05)
    given, _ = with_lengths(plan.load, Times(length=LogNormal(900.0, sigma=0.3), prompt_length=77), ["prompt_length"])
    assert (given.prompt, given.spread) == (77, 0.3) and given.mean == pytest.approx(900, rel=0.05)
    full, times = with_lengths(replace(plan.load, mean=float(plan.load.longest)), Times(), [])
    assert times.length == Constant(full.longest)


def test_tokens_that_no_step_trains_on_do_not_count():
    """Dynamic sampling drops half of the groups: a step trains on as many tokens, and takes longer."""
    times = replace(LENGTH, length=Constant(200))
    half = replace(times, accepted=0.5)
    settings = recipe("algorithm=dapo", "train.prompts_per_step=16", "train.completions_per_prompt=2")
    ((sync, _),) = simulate_scale(settings, H20, [8], times, given=["prompt_length"], steps=2)
    ((fewer, _),) = simulate_scale(settings, H20, [8], half, given=["prompt_length"], steps=2)
    for run in (sync, fewer):
        assert run.tokens_per_second * run.step_seconds == pytest.approx(16 * 2 * 200)
    assert fewer.step_seconds > sync.step_seconds
