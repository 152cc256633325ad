"""Asynchronous generation under any schedule: nothing is lost or doubled, no bound is exceeded, and it always ends."""

import asyncio
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxima.data.pending import Pending
from proxima.rollout.collector import BatchNotFilled
from tests.rollout.async_world import Checkpoint, Engine, Run, Schedule, Source, completion
from tests.runtime.prompt_rows import consumed_prompts, prompt_rows

SHARES = st.sampled_from((0.0, 0.3, 0.7))
SCHEDULES = st.builds(
    Schedule,
    seed=st.integers(0, 10**6),
    prompts=st.integers(1, 4),
    completions=st.integers(1, 3),
    greedy=st.booleans(),
    concurrent=st.integers(1, 9),
    max_lag=st.integers(1, 3),
    steps=st.integers(1, 6),
    over_age=st.sampled_from(("wait", "drop", "train")),
    long_tail=st.booleans(),
    dead_rewards=SHARES,
    batch_reward=st.booleans(),
    rejected=SHARES,
    gen_batches=st.sampled_from((0, 0, 1, 3)),
    fruitless=SHARES,
    kills=st.integers(0, 2),
    checkpoint_every=st.integers(1, 3),
    train_seconds=st.sampled_from((0.0, 1.0, 20.0)),
)


@pytest.mark.slow
@given(SCHEDULES)
@settings(max_examples=100, deadline=None)
def test_any_schedule(schedule):
    Run(schedule).go().assert_whole()


@pytest.mark.campaign("tests/rollout/test_async_collector.py::test_any_schedule")
@given(SCHEDULES)
@settings(max_examples=1_000, deadline=None)
def test_a_thousand_schedules(schedule):
    """Of 19 defects put into the collector, 5,000 schedules find 15, all of them by the 872nd; every branch that 5,000
    take is taken by the 500th."""
    Run(schedule).go().assert_whole()


def test_the_trainer_waits_less_than_it_would_alone():
    """A batch takes less time than an update: all but the first are ready when they are wanted."""
    run = Run(Schedule(prompts=2, concurrent=2, max_lag=1, steps=4, train_seconds=40.0)).go()
    assert run.waited[0] > 0 and run.waited[1:] == [0, 0, 0]
    assert [batch.metrics()["age/max"] for batch in run.batches] == [0, 1, 1, 1]


def test_stalls_are_waits_for_the_lag_begun_since_the_previous_step():
    """With one prompt a step and two places, the bound on the lag allows two prompts, then one after each step: it
    leaves a place empty once the first is generated, and again once the third is; the end of the run is no stall."""
    run = Run(Schedule(prompts=1, completions=1, concurrent=2, max_lag=1, steps=4, train_seconds=20.0)).go()
    assert [batch.measured["async/capacity_stalls"] for batch in run.batches] == [1, 0, 1, 0]


def test_the_interrupted_share_is_of_completions_that_two_versions_sampled():
    run = Run(Schedule(prompts=2, completions=2, concurrent=3, max_lag=2, steps=5, train_seconds=2.0)).go()
    versions = [[c.policy_version for g in batch.groups for c in g.completions] for batch in run.batches]
    mixed = [sum(len(set(column.tolist())) > 1 for column in columns) for columns in versions]
    assert mixed == [0, 1, 2, 3, 2]
    assert [batch.measured["interrupted_fraction"] for batch in run.batches] == [count / 4 for count in mixed]
    for batch, columns in zip(run.batches, versions, strict=True):
        lags = Counter((batch.version - np.concatenate(columns)).tolist())
        shares = {f"lag/{lag}": count / lags.total() for lag, count in lags.items()}
        assert {name: share for name, share in batch.measured.items() if name.startswith("lag/")} == shares


def test_a_step_shows_at_most_the_groups_that_it_takes():
    run = Run(Schedule(prompts=1, completions=1, concurrent=4, max_lag=3, steps=5, train_seconds=20.0)).go()
    assert set(run.shown) == {(0, 1), (1, 1)}


def test_tokens_per_second_are_of_the_time_since_the_step_began():
    """The first step waits 2 s and trains for 36.99, then .4 s pass; completions of 2 and 4 tokens are generated in it.
    In the next two, of 29.17 and 27.23 s, those of 5 and 6; in the last none is left."""
    run = Run(Schedule(prompts=1, completions=1, concurrent=1, max_lag=1, steps=4, train_seconds=20.0)).go()
    ours = [metrics["tokens_per_second/generate"] for metrics in run.metrics]
    assert ours == pytest.approx([6 / 39.392, 5 / 29.1705, 6 / 27.2328, 0.0], rel=1e-4)
    assert [metrics["idle/engine"] for metrics in run.metrics] == pytest.approx([1 - rate for rate in ours])


@pytest.mark.slow
def test_evicted_groups_are_counted_and_refunded():
    size = {"prompts": 4, "concurrent": 12, "max_lag": 2, "steps": 40}
    run = Run(Schedule(**size, long_tail=True, train_seconds=4.0, over_age="drop")).go()
    evicted = sum(batch.measured["async/evicted"] for batch in run.batches)
    assert evicted > 0 and len(prompt_rows(run.journal)) == 160 + evicted
    reasons = Counter(entry.reason for step in range(1, 41) for entry in consumed_prompts(run.journal, step))
    assert reasons == {None: 160, "stale": evicted}


@pytest.mark.parametrize("raised", ["the server is gone", None])
def test_an_engine_that_fails_ends_the_run(raised):
    class Broken(Engine):
        async def generate(self, requests):
            await asyncio.sleep(1.0)
            if raised is not None:
                raise ConnectionError(raised)
            return
            yield

    run = Run(Schedule())
    run.make_engine = Broken
    lost = "ended without all completions of prompt 0"
    with pytest.raises((ConnectionError, RuntimeError), match=raised or lost):
        run.go()
    assert run.journal.counts().get("consumed") is None


def test_nothing_is_enqueued_after_a_failure():
    """The engine fails in the first step's training, and that step's end is waited for; other prompts still end."""
    asked = []

    class Broken(Engine):
        async def generate(self, requests):
            uid = requests[0].prompt.uid
            asked.append(uid)
            if uid == 1:
                await asyncio.sleep(8.0)
                raise ConnectionError("the server is gone")
            await asyncio.sleep(1.0 if uid == 0 else 20.0)
            yield completion(uid, 0, [self.version])

    run = Run(Schedule(prompts=1, completions=1, concurrent=3, max_lag=9, steps=9, train_seconds=60.0))
    run.make_engine = Broken
    with pytest.raises(ConnectionError, match="the server is gone"):
        run.go()
    assert asked == [0, 1, 2, 3]


def test_a_resumed_run_generates_no_more_prompts_at_once_than_before():
    """Five were in flight, two of them in the engine."""
    run, source = Run(Schedule(prompts=1, completions=1, concurrent=2, max_lag=4, steps=5)), Source()
    prompts = source.next(5)
    run.journal.rewind = lambda step: run.journal.enqueue(prompts)
    run.saved = Checkpoint(cursor=source.state(), facts={"pending": [], "in_flight": [*range(5)]})
    run.go().assert_whole()
    assert run.most == 2


def test_whole_batch_rewards_compare_the_groups_of_a_step():
    run = Run(Schedule(prompts=3, steps=4, concurrent=2, max_lag=2, batch_reward=True)).go()
    run.assert_whole()
    assert run.rewards.blocks == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_an_exhausted_step_stops_or_takes_what_there_is():
    settings_of = {"prompts": 3, "steps": 3, "rejected": 1.0, "gen_batches": 2}
    run = Run(Schedule(**settings_of)).go()
    assert not run.batches[0].groups and len(run.batches[0].dropped) >= 6
    stopped = Run(Schedule(**settings_of, exhausted="stop"))
    with pytest.raises(BatchNotFilled, match=r"2 generation batches \(max_num_gen_batches\) gave 0 of 3 usable"):
        stopped.go()


def test_a_snapshot_comes_back_from_its_facts():
    """Judged, rejected and unjudged groups, and what no step has counted."""
    run = Run(Schedule(prompts=2, steps=6, concurrent=6, max_lag=3, rejected=0.3, batch_reward=True)).go()
    pending = max(run.snapshots, key=lambda x: len(x.groups) + 10 * len(x.unjudged) + 10 * len(x.rejected))
    assert pending.groups and pending.prompts
    again = Pending.of(json.loads(json.dumps(pending.facts())), pending.groups, pending.prompts)
    assert again == pending
