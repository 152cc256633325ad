"""The stream of scored groups: order, one group at a time, whole-batch rewards, failures and abandoned streams."""

import asyncio
from contextlib import aclosing
from unittest.mock import Mock

import pytest

from proxima.data.flow import Prompt
from proxima.engine.protocol import Sampling
from proxima.rollout.generator import GroupGenerator, GroupSpec, RolloutListener
from proxima.runtime.watch.clock import VirtualClock, run_virtually
from tests.rollout.async_world import Engine, Rewards, Schedule

PROMPTS = [Prompt(uid=uid, messages=(), tokens=(1, 2)) for uid in (3, 4, 5)]


class LastFirst(Engine):
    """The completions of the last prompts first."""

    def length(self, uid, sample):
        return 6 - uid


def generator(now=lambda: 0.0, **schedule):
    of = Schedule(**schedule)
    spec = GroupSpec(sampling=Sampling(top_p=0.5), completions=2, seed=7, greedy_baseline=of.greedy)
    return GroupGenerator(LastFirst(of), Rewards(of), spec, now)


def collected(made, prompts=PROMPTS):
    async def run():
        return [group async for group in made.generate(prompts, RolloutListener())]

    return run_virtually(run(), VirtualClock())


def test_groups_come_one_by_one_in_the_order_in_which_they_are_complete():
    async def first():
        made, listener = generator(), Mock(spec=RolloutListener)
        async with aclosing(made.generate(PROMPTS, listener)) as stream:
            group = await anext(stream)
            listener.rewarded.assert_called_once_with(1, 3)
            assert made.engine.running  # the others still generate
            uids = [group.prompt.uid, *[g.prompt.uid async for g in stream]]
            generated = [call.args for call in listener.generated.call_args_list]
            return uids, generated, [call.args for call in listener.completed.call_args_list]

    assert run_virtually(first(), VirtualClock()) == ([5, 4, 3], [(5,), (4,), (3,)], [(i, 6) for i in range(1, 7)])


@pytest.mark.parametrize(("batch_reward", "seconds"), [(False, 30.0), (True, 32.0)])
def test_the_scoring_time_is_that_after_the_last_completion(batch_reward, seconds):
    """Each group is scored for 30 s from its last completion on; a whole-batch reward takes 2 s more."""
    clock = VirtualClock()
    made = generator(clock.now, dead_rewards=1.0, batch_reward=batch_reward)

    async def run():
        return [group async for group in made.generate(PROMPTS, RolloutListener())]

    assert len(run_virtually(run(), clock)) == 3 and made.scoring_seconds == pytest.approx(seconds)


def test_a_whole_batch_reward_sees_all_groups_in_the_order_of_the_prompts():
    made = generator(batch_reward=True)
    groups = collected(made)
    assert [g.prompt.uid for g in groups] == [3, 4, 5] and [s.value for s in groups[0].scores] == [10.0, 11.0]
    assert collected(made, []) == []


def test_a_greedy_baseline_is_one_completion_more():
    made = generator(greedy=True)
    asked = [(r.sample, r.sampling.temperature, r.sampling.top_p, r.seed) for r in made.spec.requests(PROMPTS[0])]
    assert asked == [(0, 1.0, 0.5, 7), (1, 1.0, 0.5, 7), (2, 0.0, 1.0, 7)]
    assert all(len(g.completions) == 2 and g.baseline == 2.0 for g in collected(made))


def test_a_bug_in_a_reward_ends_the_stream():
    made = generator()
    made.rewards.score = Mock(side_effect=KeyError("a bug in the runner"))
    with pytest.raises(KeyError, match="a bug in the runner"):
        collected(made)


def test_an_abandoned_stream_leaves_nothing_running():
    async def abandon():
        made = generator(dead_rewards=1.0)
        waiting = asyncio.ensure_future(anext(made.generate(PROMPTS, RolloutListener())))
        await asyncio.sleep(7.0)  # two groups are scored, the other is generated
        tasks = len(asyncio.all_tasks())
        waiting.cancel()
        await asyncio.sleep(1.0)
        return tasks, made.engine.running, len(asyncio.all_tasks())

    assert run_virtually(abandon(), VirtualClock()) == (5, 0, 1)
