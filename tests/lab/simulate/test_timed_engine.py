"""Several replicas against arithmetic by hand."""

from dataclasses import replace

import pytest

from proxima.lab.simulate.distributions import LogNormal
from proxima.lab.simulate.timed_engine import Fleet
from tests.lab.simulate.simulated import DECODE, PREFILL, PROMPTS, TIMES, TOKENS, simulated

SYNC = "runtime.max_lag=0"
FREE = replace(TIMES, prefill_token=0.0)


@pytest.mark.parametrize("settings", [(SYNC,), ("runtime.max_lag=2", "runtime.max_concurrent_rollouts=6")])
def test_one_replica_is_the_recipes_engine(settings):
    times = replace(TIMES, length=LogNormal(mean=20.0, sigma=1.0), pause=0.05)
    own, other = simulated(*settings, times=times), simulated(*settings, times=times, fleet=Fleet(1, 64))
    assert own == other


def test_each_replica_has_slots_of_its_own():
    """16 completions in 8 slots wait; in two replicas of 8 slots they don't."""
    settings = (SYNC, "engine.slots=8", "train.prompts_per_step=8")
    first, two = simulated(*settings, fleet=Fleet(1, 8)), simulated(*settings, fleet=Fleet(2, 8))
    assert first.steps[-1]["time/generate"] == pytest.approx(2 * (PROMPTS * PREFILL + TOKENS * 0.18))
    assert two.steps[-1]["time/generate"] == pytest.approx(PROMPTS * PREFILL + DECODE)
    assert max(n for _, n in two.running) == 16


def test_the_completions_of_a_prompt_share_a_replica_and_its_prefill():
    """4 prompts on 4 replicas: each reads one prompt, and decodes two completions."""
    run = simulated(SYNC, fleet=Fleet(4, 64))
    assert run.steps[0]["time/generate"] == pytest.approx(PREFILL + TOKENS * (0.1 + 0.01 * 2))
    more = simulated(SYNC, fleet=Fleet(1000, 64))
    assert more.steps == run.steps


class _ByUid:
    def draw(self, seed: int, uid: int, sample: int) -> float:
        return 30.0 if uid % 2 else 10.0


def test_a_replica_with_nothing_left_takes_a_prompt_that_waits_elsewhere():
    """One slot each: prompts of 10 tokens at one replica, of 30 at the other. The first is done after 20 and takes the
    second prompt of 30 over."""
    times = replace(FREE, length=_ByUid())
    run = simulated(SYNC, "train.completions_per_prompt=1", times=times, fleet=Fleet(2, 1))
    assert run.steps[0]["time/generate"] == pytest.approx((10 + 10 + 30) * 0.11)


@pytest.mark.parametrize("interrupt", ["recompute", "keep", "finish"])
def test_all_replicas_get_new_weights(interrupt):
    settings = (f"engine.interrupt={interrupt}", "runtime.max_lag=1", "runtime.max_concurrent_rollouts=8")
    run = simulated(*settings, times=replace(FREE, length=LogNormal(mean=20.0, sigma=1.0)), fleet=Fleet(3, 4))
    assert len(run.steps) == 12
    assert max(record["age/max"] for record in run.steps) == 1
    assert any(record["interrupted_fraction"] > 0 for record in run.steps) == (interrupt != "finish")


def test_what_is_aborted_or_abandoned_holds_no_place():
    """Dynamic sampling abandons what it does not need any more."""
    settings = (SYNC, "algorithm=dapo", "algorithm.dynamic_sampling.oversample=2", "train.steps=20")
    times = replace(FREE, accepted=0.5, length=LogNormal(mean=20.0, sigma=1.0))
    single, three = (simulated(*settings, times=times, fleet=Fleet(n, 4)) for n in (1, 3))
    assert three.figures.tokens_per_second > 1.3 * single.figures.tokens_per_second
