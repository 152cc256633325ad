"""Simulated asynchronous runs: closed forms, and what more lag and long tails do."""

from dataclasses import replace
from itertools import pairwise

import pytest

from proxima.lab.simulate.distributions import Constant, LogNormal
from tests.lab.simulate.simulated import DECODE, PREFILL, PROMPTS, TIMES, TRAIN, simulated

KEEP = "engine.interrupt=keep"
SYNC = "runtime.max_lag=0"
GENERATE, PUBLISH = PROMPTS * PREFILL + DECODE, 0.125


def overlapping(lag, concurrent=PROMPTS):
    return f"runtime.max_lag={lag}", f"runtime.max_concurrent_rollouts={concurrent}"


def test_where_generation_is_slower_it_sets_the_pace():
    run = simulated(KEEP, *overlapping(1))
    for record in run.steps[1:-2]:
        assert record["time/step"] == pytest.approx(GENERATE + PUBLISH)
        assert record["idle/trainer"] == pytest.approx(1 - (TRAIN + PUBLISH) / (GENERATE + PUBLISH))
        assert record["idle/engine"] == pytest.approx(PUBLISH / (GENERATE + PUBLISH))
    assert run.steps[0]["time/step"] == pytest.approx(GENERATE + 0.25 + TRAIN + PUBLISH)


def test_where_training_is_slower_it_sets_the_pace():
    run = simulated(KEEP, *overlapping(1), times=replace(TIMES, update=5.0))
    train = TRAIN + 4.5
    for record in run.steps[1:-1]:
        assert record["time/step"] == pytest.approx(train + PUBLISH)
        assert record["idle/trainer"] == pytest.approx(0.0)
        assert record["idle/engine"] == pytest.approx(1 - GENERATE / (train + PUBLISH))


def test_an_engine_whose_episodes_all_wait_for_their_environments_is_idle():
    """Three turns, each answered after 2 s, of all episodes at once."""
    run = simulated(KEEP, *overlapping(1), times=replace(TIMES, turns=Constant(3.0), environment=Constant(2.0)))
    for record in run.steps[1:-2]:
        idle = record["idle/engine"] * record["time/step"]
        assert idle == pytest.approx(record["time/step"] - PROMPTS * PREFILL - 3 * DECODE) and idle > 5.99


def test_an_engine_that_is_slow_to_stop_samples_meanwhile():
    run = simulated(KEEP, *overlapping(1), times=replace(TIMES, pause=0.25))
    for record in run.steps[1:-2]:
        assert record["time/publish"] == pytest.approx(0.25 + PUBLISH)
        assert record["time/step"] == pytest.approx(GENERATE + PUBLISH)
        assert record["idle/engine"] * record["time/step"] == pytest.approx(PUBLISH)


def test_new_weights_cost_a_prefill_of_all_that_runs():
    """While a step trains and publishes, the completions of the next one get tokens; then prompt and tokens of all
    eight are run again."""
    run = simulated(*overlapping(1))
    again = run.steps[5]["time/step"] - (GENERATE + PUBLISH)
    tokens = again / TIMES.prefill_token
    assert tokens == pytest.approx(round(tokens))
    assert 8 * 20 < tokens < 8 * (20 + 10)


def test_versions_are_those_of_the_weights_that_sampled():
    """Two steps' prompts are generated at once: the second step's tokens are of version 0 in part and of version 1."""
    run = simulated(KEEP, *overlapping(1, 2 * PROMPTS))
    shares = [value for key, value in run.steps[1].items() if key.startswith("lag/")]
    assert sum(shares) == pytest.approx(1.0)
    assert run.steps[0]["lag/0"] == 1
    assert max(record["age/max"] for record in run.steps) == 1


@pytest.mark.parametrize("concurrent", [PROMPTS, 4 * PROMPTS])
def test_more_lag_never_lowers_the_throughput_of_constant_lengths(concurrent):
    long = "train.steps=24"  # the first step fills the engine
    runs = [simulated(long, KEEP, SYNC)]
    runs += [simulated(long, KEEP, *overlapping(lag, concurrent)) for lag in (1, 2, 3)]
    speeds = [run.figures.tokens_per_second for run in runs]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(speeds))
    assert all(run.figures.max_lag <= lag for lag, run in enumerate(runs))


def test_long_tails_idle_a_trainer_that_waits_for_them():
    times = replace(TIMES, length=LogNormal(mean=20.0, sigma=1.0), update=0.0, update_token=0.04)
    settings = ("train.steps=30", KEEP)
    waiting, beside = simulated(*settings, SYNC, times=times), simulated(*settings, *overlapping(2, 8), times=times)
    assert beside.figures.idle_trainer < 0.5 * waiting.figures.idle_trainer
    assert beside.figures.tokens_per_second > 1.3 * waiting.figures.tokens_per_second
    assert 0 < beside.figures.mean_lag <= beside.figures.max_lag <= 2


def test_over_age_groups_are_evicted():
    times = replace(TIMES, length=LogNormal(mean=30.0, sigma=1.5), update=0.0, update_token=0.002)
    settings = ("train.steps=30", "sampling.max_tokens=400", KEEP, *overlapping(1, 12))
    dropped = simulated(*settings, "runtime.over_age=drop", times=times).figures
    assert dropped.evicted > 0
    assert dropped.max_lag <= 1
    assert simulated(*settings, times=times).figures.evicted == 0


def test_an_engine_in_the_trainers_thread_stops_while_it_trains():
    settings = ("engine.kind=local", KEEP, *overlapping(1))
    run = simulated(*settings)
    for record in run.steps[2:-1]:
        assert record["time/step"] == pytest.approx(GENERATE + TRAIN + PUBLISH)
