"""Simulated runs against arithmetic by hand."""

from dataclasses import dataclass, replace

import pytest

from proxima.data import UserError
from proxima.engine.protocol import EngineSpec
from proxima.lab.simulate import timed_engine, timed_parts, timed_replica
from proxima.lab.simulate.distributions import Constant, LogNormal
from tests.lab.simulate.simulated import DECODE, PREFILL, PROMPTS, TIMES, TOKENS, TRAIN, simulated


def test_a_synchronous_step_is_the_sum_of_its_stages():
    run = simulated("runtime.max_lag=0")
    generate, score, publish = PROMPTS * PREFILL + DECODE, 0.25, 0.125
    step = generate + score + TRAIN + publish
    for record in run.steps:
        assert record["time/generate"] == pytest.approx(generate)
        assert record["time/score"] == pytest.approx(score)
        assert record["time/train"] == pytest.approx(TRAIN)
        assert record["time/publish"] == pytest.approx(publish)
        assert record["time/step"] == pytest.approx(step)
    figures = run.figures
    assert len(run.steps) == 12
    assert figures.steps_per_hour == pytest.approx(3600 / step)
    assert figures.tokens_per_second == pytest.approx(8 * TOKENS / step)
    assert figures.idle_trainer == pytest.approx((generate + score) / step)
    assert figures.idle_engine == pytest.approx((score + TRAIN + publish) / step)
    assert (figures.mean_lag, figures.max_lag, figures.evicted) == (0, 0, 0)


def test_completions_wait_for_slots():
    """16 completions in 8 slots: those of the first four prompts, then the others, each time at the speed of eight."""
    run = simulated("runtime.max_lag=0", "engine.slots=8", "train.prompts_per_step=8")
    assert run.steps[-1]["time/generate"] == pytest.approx(2 * (4 * PREFILL + TOKENS * (0.1 + 0.01 * 8)))


def test_the_speed_follows_how_many_run():
    """Two prompts with one completion of 10 and one of 30 tokens: 10 decode steps of two, then 20 of one."""
    times = replace(TIMES, length=_ByUid(), prefill_token=0.0)
    run = simulated("runtime.max_lag=0", "train.prompts_per_step=2", "train.completions_per_prompt=1", times=times)
    assert run.steps[0]["time/generate"] == pytest.approx(10 * 0.12 + 20 * 0.11)


@dataclass(frozen=True, kw_only=True)
class NoSlots(EngineSpec):
    """An engine that says nothing of its size."""


class _ByUid:
    def draw(self, seed: int, uid: int, sample: int) -> float:
        return 30.0 if uid % 2 else 10.0


def test_episodes_take_their_turns_and_their_environments():
    """Three turns of 10 tokens, whose KV stays, each answered after 2 s; all episodes beside each other."""
    times = replace(TIMES, turns=Constant(3.0), environment=Constant(2.0))
    run = simulated("runtime.max_lag=0", times=times)
    for record in run.steps:
        assert record["time/generate"] == pytest.approx(PROMPTS * PREFILL + 3 * (DECODE + 2.0))
        assert record["length/mean"] == 3 * TOKENS
        assert record["time/environment"] == pytest.approx(8 * 3 * 2.0)
        assert record["time/turns"] == pytest.approx(8 * (PROMPTS * PREFILL + 3 * DECODE))
    assert run.figures == simulated("runtime.max_lag=0", times=times).figures
    single = simulated("runtime.max_lag=1", times=replace(TIMES, turns=Constant(1.0)))
    assert single.figures == simulated("runtime.max_lag=1").figures
    beside = simulated("runtime.max_lag=1", "runtime.max_concurrent_rollouts=8", times=times)
    assert beside.figures.max_lag == 1 and beside.figures.tokens_per_second > run.figures.tokens_per_second


def test_lengths_are_cut_off_at_the_limit():
    run = simulated("runtime.max_lag=0", times=replace(TIMES, length=LogNormal(mean=200.0, sigma=0.0)))
    assert run.steps[0]["length/mean"] == 100
    assert run.steps[0]["truncated_fraction"] == 1


def test_dynamic_sampling_generates_until_the_batch_is_full():
    settings = ("runtime.max_lag=0", "algorithm=dapo", "train.steps=100")
    run = simulated(*settings, times=replace(TIMES, accepted=0.5))
    generated = sum(record["prompts_generated"] for record in run.steps)
    accepted = sum(record["prompts_accepted"] for record in run.steps)
    assert [record["prompts_used"] for record in run.steps] == [PROMPTS] * 100
    assert accepted / generated == pytest.approx(0.5, abs=0.06)


def test_evaluations_and_checkpoints_take_their_time_between_the_steps():
    settings = ("runtime.max_lag=0", "eval.every=5", "eval.task=arithmetic", "checkpoint.every=4")
    plain, other = simulated(*settings), simulated(*settings, times=replace(TIMES, evaluate=7.0, checkpoint=3.0))
    assert other.steps[-1]["time"] - plain.steps[-1]["time"] == pytest.approx(2 * 7.0 + 2 * 3.0)
    assert other.steps[-1]["time/step"] == pytest.approx(plain.steps[-1]["time/step"])
    assert [record["step"] for record in other.records if record["kind"] == "eval"] == [5, 10]


def test_the_parts_that_only_take_time_inherit_nothing():
    """They know the protocols of the loop, not the fields of its classes."""
    rooms = (timed_parts, timed_engine, timed_replica)
    parts = [x for m in rooms for x in vars(m).values() if getattr(x, "__module__", "") == m.__name__]
    classes = [part for part in parts if isinstance(part, type)]
    assert len(classes) >= 9 and all(part.__bases__ == (object,) for part in classes)


def test_the_same_settings_give_the_same_run():
    times = replace(TIMES, length=LogNormal(mean=20.0, sigma=1.0), score=LogNormal(mean=0.5, sigma=1.0))
    first, second, other = (simulated(f"seed={seed}", times=times) for seed in (1, 1, 2))
    assert first.records == second.records
    assert first.running == second.running
    assert other.records != first.records


def test_an_engine_without_slots_is_refused():
    with pytest.raises(
        UserError, match=r"engine.kind=tests.lab.simulate.test_simulated_run:NoSlots has no number of slots"
    ):
        simulated("engine.kind=tests.lab.simulate.test_simulated_run:NoSlots")


def test_a_step_that_can_not_be_filled_ends_with_a_line():
    settings = ("runtime.max_lag=0", "algorithm=dapo", "algorithm.dynamic_sampling.max_num_gen_batches=1")
    with pytest.raises(UserError, match=r"the simulated run ends early: step \d+: 1 generation batches"):
        simulated(*settings, times=replace(TIMES, accepted=0.2))
