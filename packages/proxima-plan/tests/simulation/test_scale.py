"""Runs on more and more devices, and for several lags: the trend of published figures, and what binds."""

from dataclasses import replace
from functools import cache

import pytest

from proxima.config.resolution import resolve
from proxima.data import FieldError, UserError
from proxima.model.parallel.sharding import Sharding
from proxima_plan.devices import Devices, device_kinds
from proxima_plan.forecast import PlannedRecipe, plan_recipe
from proxima_plan.layout import DeviceLayout
from proxima_plan.proposals import proposed_engine
from proxima_plan.simulation.fit import with_speed
from proxima_plan.simulation.lags import simulate_lag, simulate_lags
from proxima_plan.simulation.scale import ScaledRun, conclusions, simulate_plan, simulate_scale, stops_paying
from proxima_plan.simulation.simulated_run import figures_of
from proxima_plan.simulation.times import Assumptions, Observed, Times
from proxima_plan.stage_times import Sequences

H20 = device_kinds()["H20-96G"]
MEAN = Assumptions(mean=2080.0)
# a sixteenth of a step of verl's Qwen2.5-Math-7B, which has 512 prompts, for a sixteenth of its devices
RECIPE = {
    "model": {"path": "Qwen/Qwen2.5-Math-7B", "max_length": 28_822, "gradient_checkpointing": True},
    "task": "arithmetic",
    "reward": "number",
    "algorithm": "grpo",
    "engine": {"kind": "local_process", "slots": 64},
    "sampling": {"max_tokens": 28_672},
    "train": {"steps": 2, "prompts_per_step": 32, "completions_per_prompt": 16, "tokens_per_micro_batch": 61_440},
}
HYBRID = Sharding(kind="hybrid", param_dtype="bfloat16")
EIGHT = DeviceLayout(8, HYBRID, engines=8)


@cache
def recipe(*overrides):
    return resolve(RECIPE, overrides)


def on(*counts):
    return [Devices(H20, count) for count in counts]


def run_on(count, *, beside=0, lag=0):
    layout = DeviceLayout(count - beside, HYBRID, engines=beside or count, colocated=not beside)
    plan = PlannedRecipe.of(recipe(), Devices(H20, count), 2080.0).plan(layout)
    return simulate_plan(
        recipe().config, replace(plan, load=replace(plan.load, engine=proposed_engine(plan.load.engine))), MEAN, lag
    )


@pytest.mark.slow
def test_past_some_devices_only_overlap_helps():
    """verl, 32 / 64 / 128 devices: synchronous 790 / 365 / 356 s, asynchronous 295 / 189 / 151 s."""
    sync = {count: run_on(count) for count in (2, 4, 8, 32)}
    first, second = (sync[n].step_seconds / sync[2 * n].step_seconds for n in (2, 4))
    assert 1.1 < first < 2.2 and first > second * 0.9
    assert sync[8].step_seconds / sync[32].step_seconds < 2.2  # for four times the devices
    assert sync[2].waiting < sync[8].waiting < sync[32].waiting
    assert sync[32].binds.startswith("generate: longest completion ")
    assert run_on(8, beside=4, lag=1).waiting < sync[8].waiting


@pytest.mark.slow
def test_more_devices_never_take_longer():
    """Constant lengths, so that no draw of a longer one is in the way."""
    settings = recipe("train.prompts_per_step=16", "sampling.max_tokens=300")
    pairs = simulate_scale(settings, on(8, 16, 32), Assumptions(mean=300.0))
    for runs in zip(*pairs, strict=True):
        seconds = [run.step_seconds for run in runs]
        assert seconds == sorted(seconds, reverse=True)
        for run in runs:
            assert run.tokens_per_second * run.step_seconds == pytest.approx(256 * 300)
            assert run.layout is not None and run.layout.devices <= run.devices
    assert [sync.layout.colocated for sync, _ in pairs] == [True] * 3
    assert [beside.layout.colocated for _, beside in pairs] == [False] * 3
    assert [line.partition(":")[0] for line in conclusions(pairs)] == ["synchronous", "asynchronous"]


@pytest.mark.slow
def test_devices_that_are_too_few_say_so():
    ((sync, beside),) = simulate_scale(recipe("model.path=Qwen/Qwen2.5-32B"), on(2), MEAN)
    assert sync.binds.startswith("needs ") and sync.binds.endswith("GiB a device, which has 95")
    assert sync.layout is beside.layout is None
    ((sync, _),) = simulate_scale(recipe("placement={kind: torchrun, context_parallel: 4}"), on(2), MEAN)
    assert sync.binds == "too few for the groups of the placement"


@pytest.mark.slow
def test_a_recipe_that_can_not_be_planned_is_refused():
    with pytest.raises(UserError, match="the size of no-such-model is not known"):
        simulate_scale(recipe("model.path=no-such-model"), on(8), MEAN)
    with pytest.raises(FieldError, match="tensor_parallel"):
        simulate_scale(recipe("placement={kind: torchrun, tensor_parallel: 5}"), on(40), MEAN)


def _run(devices, speed):
    return ScaledRun(devices=devices, lag=0, binds="", layout=EIGHT, tokens_per_second=speed, step_seconds=100 / speed)


def test_where_devices_stop_paying():
    runs = [_run(8, 1.0), _run(16, 1.2), _run(32, 2.0), _run(64, 2.4), _run(256, 2.9)]
    assert stops_paying(runs) is runs[2]  # 8 to 16 is a dip, after which more devices pay again
    assert stops_paying(runs[:3]) is None
    assert stops_paying([runs[0], _run(16, 2.0), _run(64, 3.3)]).devices == 16  # 1.28 for each doubling
    assert stops_paying(runs[:1]) is None


def test_the_times_are_those_of_the_plan():
    plan = PlannedRecipe.of(recipe(), Devices(H20, 8), 2080.0).plan(EIGHT)
    times = Times(plan, replace(MEAN, engine=2.0, trainer=3.0))
    assert times.other == 3 * plan.stages[-1].seconds
    assert times.decode_step(16) == 2 * plan.times.decode_step(16, times.context)[0]
    assert 128 + 2080 / 2 < times.context < 128 + 28_672  # a long completion runs longer: more of its tokens are there
    whole = Sequences.of([2000 + plan.load.prompt_tokens] * 512)
    expected = plan.times.update(whole).seconds + plan.load.forwards * plan.times.forward(whole).seconds
    assert times.training([2000] * 512) == pytest.approx(3 * expected)
    drawn = [times.length(0, uid, 0) for uid in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(2080, rel=0.05)


def test_observed_lengths_stay_together_and_are_drawn_equally_often():
    lengths = Observed((1, 2, 30, 40), together=2)
    groups = [tuple(lengths.draw(0, uid, sample) for sample in (0, 1)) for uid in range(8)]
    assert sorted(groups) == [(1.0, 2.0)] * 4 + [(30.0, 40.0)] * 4
    load = PlannedRecipe.of(recipe(), Devices(H20, 8)).load
    own = Assumptions(observed=lengths, prompt=77).load(load)
    assert (own.prompt, own.mean, own.endless) == (77, 18.25, 0.0) and Assumptions().load(load) is load


@pytest.mark.slow
def test_lags_of_a_layout_and_a_speed_that_is_found_again():
    """A run that is itself simulated, with a slow engine and a slower trainer, is as fast and as busy once fitted."""
    settings = recipe("sampling.max_tokens=300", "train.steps=6", "train.prompts_per_step=8")
    cells = simulate_lags(settings, Devices(H20, 8), Assumptions(mean=100.0), [0, 1, 2])
    named = [(cell.lag, cell.concurrent) for cell in cells]
    assert named == [(0, None), (1, 8), (1, 16), (2, 8), (2, 16)] and cells[0].speed_up == 1
    assert all(cell.figures.max_lag <= cell.lag for cell in cells)
    slow = Assumptions(mean=100.0, engine=2.0, trainer=3.0)
    plan = plan_recipe(settings, Devices(H20, 8), mean=100.0)
    run = simulate_lag(settings.config, plan, slow, 0, None)
    observed = Observed(tuple(round(Times(plan, slow).length(0, uid, 0)) for uid in range(256)))
    given = Assumptions(mean=100.0, observed=observed, prompt=plan.load.prompt)
    found = with_speed(given, run[1:], settings, Devices(H20, 8))
    assert found.trainer > 1.5 < found.engine
    real, fitted = figures_of(run[1:]), figures_of(simulate_lag(settings.config, plan, found, 0, None)[1:])
    assert fitted.tokens_per_second == pytest.approx(real.tokens_per_second, rel=0.1)
    assert fitted.idle_trainer == pytest.approx(real.idle_trainer, abs=0.05)
