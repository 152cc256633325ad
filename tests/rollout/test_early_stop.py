"""Groups whose completions are stopped: the same ones at any speed of engine and rewards, and the same kept set."""

import asyncio
import random
from types import SimpleNamespace

import numpy as np
import pytest

from proxima.core.selection.dropping import Prune
from proxima.core.selection.stopping import StopRule, stops_in_time
from proxima.data import UserError
from proxima.data.flow import Completion, Prompt, Score
from proxima.engine.protocol import Capabilities, InFlight, Sampling
from proxima.rollout.generator import GroupGenerator, GroupSpec, RolloutListener
from proxima.runtime.watch.clock import VirtualClock, run_virtually

SIZE = 6
PRUNE = Prune(rate=0.75, stop=True, reward_range=(0.0, 1.0))
BASELINE, MEAN = StopRule(PRUNE, "baseline", 0.0, 1.0), StopRule(PRUNE, "mean", 0.0, 1.0)


class Engine:
    """Completions of given lengths, each with its own seconds a token and start; `abort` ends those of some samples."""

    def __init__(self, lengths, pace, in_flight=True):
        self.lengths, self.pace = lengths, pace
        self.capabilities = Capabilities(in_flight=in_flight, aborts_samples=True)
        self.tokens, self.ended, self.aborts = {}, {}, []
        self.sampled = {}  # of what it was asked to end

    async def generate(self, requests):
        arrivals = asyncio.Queue()

        async def run(request):
            key = request.prompt.uid, request.sample
            self.ended[key] = asyncio.Event()
            start, seconds = self.pace(*key)
            reason = "stop"
            await asyncio.sleep(start)
            self.tokens[key] = 0
            while self.tokens[key] < self.lengths[key]:
                try:
                    await asyncio.wait_for(self.ended[key].wait(), seconds)
                except TimeoutError:
                    self.tokens[key] += 1
                else:
                    reason = "abort"
                    self.sampled[key] = self.tokens[key]
                    break
            await asyncio.sleep(0.1)  # on its way to the caller
            text = "x" * self.tokens[key]
            arrivals.put_nowait(Completion.of_text(*key, text, [3] * self.tokens.pop(key), reason))

        tasks = [asyncio.create_task(run(request)) for request in requests]
        try:
            for _ in requests:
                yield await arrivals.get()
        finally:
            for task in tasks:
                task.cancel()

    async def in_flight(self):
        return [
            InFlight(
                key=(*key, 0),
                prompt_tokens=np.array([1], np.int32),
                tokens=np.zeros(count, np.int32),
                policy_version=np.zeros(count, np.int32),
            )
            for key, count in self.tokens.items()
            if count
        ]

    async def abort(self, prompt_uid, samples=None):
        self.aborts.append((prompt_uid, sorted(samples)))
        for sample in samples:
            self.ended[prompt_uid, sample].set()


def rewards_of(values, seconds=lambda sample: 0.0):
    async def score(prompt, completions):
        await asyncio.sleep(max(seconds(completion.sample) for completion in completions))
        return [values[prompt.uid, completion.sample] for completion in completions]

    return SimpleNamespace(score=score, has_batch=False)


def generated(engine, rewards, rule, uids=(7,), greedy=False):
    spec = GroupSpec(sampling=Sampling(), completions=SIZE, greedy_baseline=greedy)
    made = GroupGenerator(engine, rewards, spec, lambda: 0.0, None, rule)
    prompts = [Prompt(uid=uid, messages=(), tokens=(1,)) for uid in uids]

    async def run():
        return [group async for group in made.generate(prompts, RolloutListener())]

    groups = {group.prompt.uid: group for group in run_virtually(run(), VirtualClock())}
    assert not made._watched
    return groups


def stopped(group):
    return {i for i, score in enumerate(group.scores) if score.stopped}


def test_what_can_not_be_kept_is_ended_by_the_engine():
    """The first two are right and short; the greedy one is wrong, so that nothing can precede sample 0."""
    lengths = {(7, sample): 2 if sample < 2 else 50 for sample in range(SIZE)} | {(7, SIZE): 1}
    scores = {(7, sample): Score(value=float(sample < 2)) for sample in range(SIZE + 1)}
    engine = Engine(lengths, lambda uid, sample: (0.0, 1.0))
    group = generated(engine, rewards_of(scores), BASELINE, greedy=True)[7]
    assert engine.aborts == [(7, [2, 3, 4, 5])] and stopped(group) == {2, 3, 4, 5} and group.baseline == 0.0
    assert [completion.finish_reason for completion in group.completions] == ["stop"] * 2 + ["abort"] * 4
    assert [completion.generated for completion in group.completions] == [2] * 6 and not group.completions[2].text
    assert all(2 < tokens < 9 for tokens in engine.sampled.values())
    assert [score.value for score in group.scores[:2]] == [1.0, 1.0]


def test_one_that_may_end_earlier_is_waited_for():
    """Sample 1 begins late. Until it has as many tokens as sample 0 had, it could end before it, and be kept."""
    lengths = {(7, sample): 2 if sample == 0 else 60 for sample in range(SIZE)} | {(7, SIZE): 1}
    scores = {(7, sample): Score(value=float(sample == 0)) for sample in range(SIZE + 1)}
    engine = Engine(lengths, lambda uid, sample: (20.0 if sample == 1 else 0.0, 1.0))
    group = generated(engine, rewards_of(scores), BASELINE, greedy=True)[7]
    assert engine.aborts == [(7, [1, 2, 3, 4, 5])]
    assert [completion.generated for completion in group.completions] == [2] * 6
    assert [engine.sampled[7, sample] for sample in range(1, SIZE)] == pytest.approx([3, 23, 23, 23, 23], abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("centre", ["mean", "baseline"])
@pytest.mark.parametrize("chance", [0.0, 0.2])
def test_the_same_are_stopped_at_any_speed(centre, chance):
    """Engines with other starts and paces, and rewards that are late, lead to the groups that lengths and rewards
    alone decide; an engine is never asked to end one of the others."""
    rule, draw = StopRule(PRUNE, centre, 0.0, 1.0, chance), random.Random(5)
    some = False
    for trial in range(25):
        uids = (1, 2)
        samples = range(SIZE + 1)
        lengths = {(uid, sample): draw.randint(1, 12) for uid in uids for sample in samples}
        values = {key: Score(value=float(draw.random() < 0.4)) for key in lengths}
        values[1, 2] = Score.failed("away")
        for seed in range(3):

            def pace(uid, sample, seed=seed):
                own = random.Random(f"{seed} {uid} {sample}")
                return own.choice([0.0, 0.0, 9.0]), own.choice([0.5, 1.0, 3.0])

            def late(sample, seed=seed):
                return random.Random(f"late {seed} {sample}").choice([0.0, 0.0, 7.0])

            engine = Engine(dict(lengths), pace if seed else lambda uid, sample: (0.0, 1.0))
            greedy = centre == "baseline"
            groups = generated(engine, rewards_of(values, late), rule, uids, greedy)
            for uid in uids:
                of_uid = {sample: lengths[uid, sample] for sample in range(SIZE + greedy)}
                worth = {s: values[uid, s].value if values[uid, s].valid else None for s in of_uid}
                expected = stops_in_time(rule, of_uid, worth, SIZE, SIZE if greedy else None)
                assert stopped(groups[uid]) == expected.keys(), (trial, seed)
                asked = {sample for aborted, found in engine.aborts if aborted == uid for sample in found}
                assert asked <= expected.keys()
                some = some or bool(asked)
                for completion, score in zip(groups[uid].completions, groups[uid].scores, strict=True):
                    sample = completion.sample
                    assert completion.generated == expected.get(sample, lengths[uid, sample])
                    assert sample in expected or score is values[uid, sample]
    assert some


def test_a_reward_outside_its_range_is_named():
    scores = {(7, sample): Score(value=2.0) for sample in range(SIZE)}
    engine = Engine({(7, sample): 3 for sample in range(SIZE)}, lambda uid, sample: (0.0, 1.0))
    with pytest.raises(UserError, match=r"a reward of 2 is outside prune's reward_range=\[0, 1\]"):
        generated(engine, rewards_of(scores), MEAN)


def test_a_sum_of_rewards_that_is_above_its_range_by_rounding_is_the_highest_reward():
    """0.1 + 0.2 is 0.30000000000000004. The two that are right and the highest possible reward tie, by sample."""
    lengths = {(7, sample): 2 if sample < 5 else 50 for sample in range(SIZE)}
    scores = {(7, sample): Score(value=0.1 + 0.2 if sample == 0 else 0.0) for sample in range(SIZE)}
    rule = StopRule(Prune(rate=0.75, stop=True, reward_range=(0.0, 0.3)), "mean", 0.0, 0.3)
    group = generated(Engine(lengths, lambda uid, sample: (0.0, 1.0)), rewards_of(scores), rule)[7]
    assert stopped(group) == {5} and group.scores[0].value == 0.1 + 0.2
    assert rule.in_range(0.3 + 1e-9) is None and rule.in_range(-1e-9) is None and rule.in_range(-1e-11) == 0.0


def test_tokens_that_an_engine_loses_change_no_stop_that_was_made():
    """Samples 2 to 4 are stopped by their chance. Then another one is sampled anew, ends sooner, and would have changed
    the chances."""
    draw = random.Random(267)
    lengths = {(7, sample): draw.randint(2, 30) for sample in range(SIZE + 1)}
    scores = {}
    for sample in range(SIZE + 1):
        scored = draw.random() < 0.8
        scores[7, sample] = Score(value=float(draw.random() < 0.4)) if scored else Score.failed("away")

    class Loses(Engine):
        async def abort(self, uid, samples=None):
            await super().abort(uid, samples)
            for key in self.tokens:
                if key[1] not in samples:
                    self.tokens[key], self.lengths[key] = 0, 2

    engine = Loses(lengths, lambda uid, sample: (0.0, 1.0))
    group = generated(engine, rewards_of(scores), StopRule(PRUNE, "mean", 0.0, 1.0, 0.2))[7]
    [(_, asked)] = engine.aborts
    assert asked == [2, 3, 4] and set(asked) <= stopped(group)


def test_an_engine_that_does_not_tell_what_it_generates_is_refused():
    with pytest.raises(
        UserError, match="needs an engine with the capabilities in_flight and aborts_samples, not Engine"
    ):
        generated(Engine({}, None, in_flight=False), None, MEAN)


def test_an_error_of_the_engine_leaves_nothing_watched():
    class Breaks(Engine):
        async def generate(self, requests):
            yield Completion.of_text(7, 0, "x", [3])
            raise RuntimeError("gone")

    scores = {(7, sample): Score(value=0.0) for sample in range(SIZE)}
    with pytest.raises(RuntimeError, match="gone"):
        generated(Breaks({}, None), rewards_of(scores, lambda sample: 50.0), MEAN)
