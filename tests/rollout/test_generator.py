"""The stream of scored groups: order, one group at a time, whole-batch rewards, failures and abandoned streams."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from proxima.data import Completion, Prompt, Score
from proxima.engine.protocol import Sampling
from proxima.rollout.generator import GroupGenerator, GroupSpec, RolloutListener

PROMPTS = [Prompt(uid=uid, messages=(), tokens=(1, 2)) for uid in (3, 4, 5)]


class Engine:
    """One completion per request, those of the last prompts first."""

    def __init__(self):
        self.closed, self.requests = False, []

    async def generate(self, requests):
        self.requests = list(requests)
        try:
            for request in reversed(requests):
                await asyncio.sleep(0)
                uid, sample = request.prompt.uid, request.sample
                yield Completion.of_text(uid, sample, str(sample), tokens=(sample,))
        finally:
            self.closed = True


class Rewards:
    def __init__(self, has_batch=False, fail=False, hang=False):
        self.has_batch, self.fail, self.hang, self.cancelled = has_batch, fail, hang, 0

    async def score(self, prompt, completions):
        if self.fail:
            raise KeyError("a bug in the runner")
        if self.hang:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return [Score(value=float(c.text)) for c in completions]

    async def score_batch(self, groups):
        return [replace(g, scores=tuple(replace(s, value=s.value + 10) for s in g.scores)) for g in groups]


class Listener(RolloutListener):
    def __init__(self):
        self.events = []

    def completed(self, done, total):
        self.events.append(("completed", done, total))

    def rewarded(self, done, total):
        self.events.append(("rewarded", done, total))


def generator(engine=None, rewards=None, **spec):
    spec = GroupSpec(**{"sampling": Sampling(top_p=0.5), "completions": 2, "seed": 7} | spec)
    return GroupGenerator(engine or Engine(), rewards or Rewards(), spec, lambda: 0.0)


def collected(stream):
    async def run():
        return [group async for group in stream]

    return asyncio.run(run())


def test_groups_come_one_by_one_in_the_order_in_which_they_are_complete():
    async def first():
        engine, listener = Engine(), Listener()
        async with aclosing(generator(engine).generate(PROMPTS, listener)) as stream:
            group = await anext(stream)
            assert listener.events.count(("rewarded", 1, 3)) == 1 and not engine.closed  # the others still generate
            return [group.prompt.uid, *[g.prompt.uid async for g in stream]], listener.events

    uids, events = asyncio.run(first())
    assert uids == [5, 4, 3]
    assert [e for e in events if e[0] == "completed"] == [("completed", i, 6) for i in range(1, 7)]


def test_a_whole_batch_reward_sees_all_groups_in_the_order_of_the_prompts():
    groups = collected(generator(rewards=Rewards(has_batch=True)).generate(PROMPTS, RolloutListener()))
    assert [g.prompt.uid for g in groups] == [3, 4, 5] and [s.value for s in groups[0].scores] == [10.0, 11.0]


def test_a_greedy_baseline_is_one_completion_more():
    engine = Engine()
    groups = collected(generator(engine, greedy_baseline=True).generate(PROMPTS, RolloutListener()))
    settings = [(r.sample, r.sampling.temperature, r.sampling.top_p, r.seed) for r in engine.requests[:3]]
    assert settings == [(0, 1.0, 0.5, 7), (1, 1.0, 0.5, 7), (2, 0.0, 1.0, 7)]
    assert all(len(g.completions) == 2 and g.baseline == 2.0 for g in groups)


def test_a_bug_in_a_reward_ends_the_stream():
    with pytest.raises(KeyError, match="a bug in the runner"):
        collected(generator(rewards=Rewards(fail=True)).generate(PROMPTS, RolloutListener()))


def test_an_abandoned_stream_leaves_nothing_running():
    async def abandon():
        engine, rewards = Engine(), Rewards(hang=True)
        stream = generator(engine, rewards).generate(PROMPTS, RolloutListener())
        waiting = asyncio.ensure_future(anext(stream))
        for _ in range(20):
            await asyncio.sleep(0)
        waiting.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        return rewards.cancelled, engine.closed, len(asyncio.all_tasks())

    assert asyncio.run(abandon()) == (3, True, 1)


def test_no_prompts_are_no_groups():
    assert collected(generator(rewards=Rewards(has_batch=True)).generate([], RolloutListener())) == []
