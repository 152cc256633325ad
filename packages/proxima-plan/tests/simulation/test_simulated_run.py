"""Simulated runs against arithmetic by hand: closed forms, and what more lag and long tails do."""

from dataclasses import replace
from itertools import pairwise

import pytest

from proxima.data import UserError
from proxima_plan.simulation.simulated_run import figures_of
from proxima_plan.simulation.times import Assumptions

from .simulated import DECODE, PREFILL, PROMPTS, PUBLISH, TOKENS, TRAIN, ByHand, Drawn, simulated

KEEP = "engine.interrupt=keep"
SYNC = "runtime.max_lag=0"
GENERATE = PROMPTS * PREFILL + DECODE
FREE = ByHand(prefill_token=0.0)


def overlapping(lag, concurrent=PROMPTS):
    return f"runtime.max_lag={lag}", f"runtime.max_concurrent_rollouts={concurrent}"


@pytest.mark.slow
def test_a_synchronous_step_is_the_sum_of_its_stages():
    run = simulated(SYNC)
    step = GENERATE + 0.25 + TRAIN + PUBLISH
    for record in run:
        assert record["time/generate"] == pytest.approx(GENERATE)
        assert record["time/score"] == pytest.approx(0.25)
        assert record["time/train"] == pytest.approx(TRAIN)
        assert record["time/publish"] == pytest.approx(PUBLISH)
        assert record["time/step"] == pytest.approx(step)
    figures = figures_of(run)
    assert len(run) == 12
    assert figures.steps_per_hour == pytest.approx(3600 / step)
    assert figures.tokens_per_second == pytest.approx(8 * TOKENS / step)
    assert figures.idle_trainer == pytest.approx((GENERATE + 0.25) / step)
    assert figures.idle_engine == pytest.approx((0.25 + TRAIN + PUBLISH) / step)
    assert (figures.mean_lag, figures.max_lag, figures.evicted) == (0, 0, 0)
    resting = figures_of(simulated(SYNC, times=ByHand(other=0.5)))
    assert resting.idle_trainer == pytest.approx((GENERATE + 0.25) / (step + 0.5))
    assert resting.idle_engine == pytest.approx(1 - GENERATE / (step + 0.5))


@pytest.mark.slow
def test_completions_wait_for_slots_and_each_replica_has_its_own():
    """16 completions in 8 slots: those of the first four prompts, then the others; in two replicas they don't wait."""
    first, two = (simulated(SYNC, "train.prompts_per_step=8", replicas=n, slots=8) for n in (1, 2))
    assert first[-1]["time/generate"] == pytest.approx(2 * (4 * PREFILL + TOKENS * (0.1 + 0.01 * 8)))
    assert two[-1]["time/generate"] == pytest.approx(PROMPTS * PREFILL + DECODE)


def test_the_speed_follows_how_many_run():
    """Two prompts with one completion of 10 and one of 30 tokens: 10 decode steps of two, then 20 of one."""
    times = replace(FREE, lengths=(10, 30))
    run = simulated(SYNC, "train.prompts_per_step=2", "train.completions_per_prompt=1", times=times)
    assert run[0]["time/generate"] == pytest.approx(10 * 0.12 + 20 * 0.11)


@pytest.mark.slow
def test_the_completions_of_a_prompt_share_a_replica_and_its_prefill():
    """4 prompts on 4 replicas: each reads one prompt, and decodes two completions."""
    run = simulated(SYNC, replicas=4)
    assert run[0]["time/generate"] == pytest.approx(PREFILL + TOKENS * (0.1 + 0.01 * 2))
    assert simulated(SYNC, replicas=1000) == run


def test_prompts_wait_in_one_queue_for_the_next_replica_with_room():
    """One slot each: prompts of 10, 30, 10 and 30 tokens. The first replica is done after 20, and takes the last."""
    run = simulated(SYNC, "train.completions_per_prompt=1", times=replace(FREE, lengths=(10, 30)), replicas=2, slots=1)
    assert run[0]["time/generate"] == pytest.approx((10 + 10 + 30) * 0.11)


@pytest.mark.slow
def test_dynamic_sampling_generates_until_the_batch_is_full():
    times = replace(ByHand(), assumed=Assumptions(accepted=0.5))
    run = simulated(SYNC, "algorithm=dapo", "train.steps=60", times=times)
    generated = sum(record["prompts_generated"] for record in run)
    accepted = sum(record["prompts_accepted"] for record in run)
    assert [record["prompts_used"] for record in run] == [PROMPTS] * 60
    assert accepted / generated == pytest.approx(0.5, abs=0.06)


def test_a_step_that_can_not_be_filled_ends_with_a_line():
    times = replace(ByHand(), assumed=Assumptions(accepted=0.2))
    settings = (SYNC, "algorithm=dapo", "algorithm.dynamic_sampling.max_num_gen_batches=1")
    with pytest.raises(UserError, match=r"the simulated run ends early: step \d+: 1 generation batches"):
        simulated(*settings, times=times)


@pytest.mark.slow
def test_what_is_abandoned_holds_no_place():
    """Dynamic sampling abandons what it does not need any more."""
    settings = (SYNC, "algorithm=dapo", "algorithm.dynamic_sampling.oversample=2", "train.steps=20")
    times = Drawn(prefill_token=0.0, assumed=Assumptions(accepted=0.5))
    single, three = (simulated(*settings, times=times, replicas=n, slots=4) for n in (1, 3))
    assert figures_of(three).tokens_per_second > 1.3 * figures_of(single).tokens_per_second


@pytest.mark.slow
def test_the_same_settings_give_the_same_run():
    first, second, other = (simulated(f"seed={seed}", times=Drawn()) for seed in (1, 1, 2))
    assert first == second
    assert other != first


def test_where_generation_is_slower_it_sets_the_pace():
    run = simulated(KEEP, *overlapping(1))
    for record in run[1:-2]:
        assert record["time/step"] == pytest.approx(GENERATE + PUBLISH)
        assert record["idle/trainer"] == pytest.approx(1 - (TRAIN + PUBLISH) / (GENERATE + PUBLISH))
        assert record["idle/engine"] == pytest.approx(PUBLISH / (GENERATE + PUBLISH))
    assert run[0]["time/step"] == pytest.approx(GENERATE + 0.25 + TRAIN + PUBLISH)


def test_where_training_is_slower_it_sets_the_pace():
    run = simulated(KEEP, *overlapping(1), times=ByHand(update=5.0))
    train = TRAIN + 4.5
    for record in run[1:-1]:
        assert record["time/step"] == pytest.approx(train + PUBLISH)
        assert record["idle/trainer"] == pytest.approx(0.0)
        assert record["idle/engine"] == pytest.approx(1 - GENERATE / (train + PUBLISH))


def test_an_engine_in_the_trainers_thread_stops_while_it_trains():
    run = simulated(KEEP, *overlapping(1), in_thread=True)
    for record in run[2:-1]:
        assert record["time/step"] == pytest.approx(GENERATE + TRAIN + PUBLISH)


def test_new_weights_cost_a_prefill_of_all_that_runs():
    """While a step trains and publishes, the completions of the next one get tokens; then prompt and tokens of all
    eight are run again."""
    again = simulated(*overlapping(1))[5]["time/step"] - (GENERATE + PUBLISH)
    tokens = again / 0.001
    assert tokens == pytest.approx(round(tokens))
    assert 8 * 20 < tokens < 8 * (20 + 10)


def test_versions_are_those_of_the_weights_that_sampled():
    """Two steps' prompts are generated at once: the second step's tokens are of version 0 in part and of version 1."""
    run = simulated(KEEP, *overlapping(1, 2 * PROMPTS))
    shares = [value for key, value in run[1].items() if key.startswith("lag/")]
    assert sum(shares) == pytest.approx(1.0)
    assert run[0]["lag/0"] == 1
    assert max(record["age/max"] for record in run) == 1


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", ["recompute", "keep", "finish"])
def test_all_replicas_get_new_weights(interrupt):
    settings = (f"engine.interrupt={interrupt}", *overlapping(1, 8))
    run = simulated(*settings, times=Drawn(prefill_token=0.0), replicas=3, slots=4)
    assert len(run) == 12
    assert max(record["age/max"] for record in run) == 1
    assert any(record["interrupted_fraction"] > 0 for record in run) == (interrupt != "finish")


@pytest.mark.slow
@pytest.mark.parametrize("concurrent", [PROMPTS, 4 * PROMPTS])
def test_more_lag_never_lowers_the_throughput_of_constant_lengths(concurrent):
    long = "train.steps=24"  # the first step fills the engine
    runs = [simulated(long, KEEP, SYNC)]
    runs += [simulated(long, KEEP, *overlapping(lag, concurrent)) for lag in (1, 2, 3)]
    speeds = [figures_of(run).tokens_per_second for run in runs]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(speeds))
    assert all(figures_of(run).max_lag <= lag for lag, run in enumerate(runs))


@pytest.mark.slow
def test_long_tails_idle_a_trainer_that_waits_for_them():
    times, settings = Drawn(update=0.0, update_token=0.04), ("train.steps=15", KEEP)
    waiting, beside = simulated(*settings, SYNC, times=times), simulated(*settings, *overlapping(2, 8), times=times)
    assert figures_of(beside).idle_trainer < 0.5 * figures_of(waiting).idle_trainer
    assert figures_of(beside).tokens_per_second > 1.3 * figures_of(waiting).tokens_per_second
    assert 0 < figures_of(beside).mean_lag <= figures_of(beside).max_lag <= 2


@pytest.mark.slow
def test_over_age_groups_are_evicted():
    times = Drawn(mean=30.0, spread=1.5, longest=400, update=0.0, update_token=0.002)
    settings = ("train.steps=12", "sampling.max_tokens=400", KEEP, *overlapping(1, 12))
    dropped = figures_of(simulated(*settings, "runtime.over_age=drop", times=times))
    assert dropped.evicted > 0
    assert dropped.max_lag <= 1
    assert figures_of(simulated(*settings, times=times)).evicted == 0
