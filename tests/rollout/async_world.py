"""A loop around `AsyncCollector` on virtual time: an engine, rewards and a trainer that only take time, the real
journal, and kills at any moment."""

import asyncio
import random
from dataclasses import dataclass, field, replace

from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.pending import Pending
from proxima.engine.protocol import Sampling
from proxima.rollout.async_collector import AsyncCollector
from proxima.rollout.collector import CollectedBatch, Refill, group_age
from proxima.rollout.generator import GroupGenerator, GroupSpec, RolloutListener
from proxima.rollout.prompt_limits import DynamicSampling, InFlightLimit
from proxima.runtime.resume.rewind import RestoredJournal
from proxima.runtime.watch.clock import VirtualClock, run_virtually
from proxima.task.prompts import Cursor
from tests.runtime.prompt_rows import prompt_rows

ROWS = 7


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What happens in a run; everything else is drawn by the seed."""

    seed: int = 0
    prompts: int = 3
    completions: int = 2
    greedy: bool = False  # one more completion of each prompt, which is never trained on
    concurrent: int = 4
    max_lag: int = 1
    steps: int = 5
    over_age: str = "wait"
    long_tail: bool = False  # a few prompts take ten times as long
    dead_rewards: float = 0.0  # share of the prompts whose rewards answer only by a timeout
    batch_reward: bool = False
    rejected: float = 0.0  # share of the groups that the selection rejects; > 0: dynamic sampling
    gen_batches: int = 0  # then the step takes what there is; 0: no limit
    exhausted: str = "partial"
    fruitless: float = 0.0  # share of the steps without new weights
    kills: int = 0
    checkpoint_every: int = 1
    train_seconds: float = 5.0


class Source:
    """Prompts of the cursor's order."""

    pool = None

    def __init__(self):
        self.cursor, self.rows = Cursor(ROWS, seed=1), range(ROWS)

    def next(self, count):
        return self.prompts_for(self.cursor.next(count))

    def prompts_for(self, uids):
        return [Prompt(uid=uid, messages=(), tokens=(1, 1 + self.cursor.row(uid))) for uid in uids]

    def state(self):
        return self.cursor.state()

    def load(self, state):
        self.cursor.load(state)


class Engine:
    """Completions of one token a second, which carry the version at that time."""

    def __init__(self, schedule):
        self.schedule, self.version, self.running, self.most = schedule, 0, 0, 0
        self.sampling = asyncio.Event()
        self.sampling.set()

    def length(self, uid, sample):
        draw = random.Random(f"length {self.schedule.seed} {uid} {sample}")
        long = self.schedule.long_tail and random.Random(f"tail {self.schedule.seed} {uid}").random() < 0.2
        return draw.randint(1, 6) * (10 if long else 1)

    async def generate(self, requests):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for request in sorted(requests, key=lambda r: self.length(r.prompt.uid, r.sample)):
                uid, versions = request.prompt.uid, []
                for _ in range(self.length(uid, request.sample)):
                    await asyncio.sleep(1.0)
                    await self.sampling.wait()
                    versions.append(self.version)
                yield completion(uid, request.sample, versions)
        finally:
            self.running -= 1


def completion(uid, sample, versions):
    n = len(versions)
    return replace(Completion.of_text(uid, sample, "x" * n, [3] * n), policy_version=versions)


class Rewards:
    def __init__(self, schedule):
        self.schedule, self.has_batch, self.blocks = schedule, schedule.batch_reward, []

    async def score(self, prompt, completions):
        draw = random.Random(f"score {self.schedule.seed} {prompt.uid}")
        if draw.random() < self.schedule.dead_rewards:
            await asyncio.sleep(30.0)
            return [Score.failed("timed out")] * len(completions)
        await asyncio.sleep(draw.choice((0.0, 0.0, 1.0, 9.0)))
        return [Score(value=float(completion.sample)) for completion in completions]

    async def score_batch(self, groups):
        self.blocks.append([group.prompt.uid for group in groups])
        await asyncio.sleep(2.0)
        return [replace(g, scores=tuple(replace(s, value=s.value + 10) for s in g.scores)) for g in groups]


class Recorder(RolloutListener):
    def __init__(self, journal, shown):
        self.journal, self.shown = journal, shown

    def rewarded(self, done, wanted):
        self.shown.append((done, wanted))

    def enqueued(self, prompts):
        self.journal.enqueue(prompts)
        self.journal.generating(prompt.uid for prompt in prompts)

    def scored(self, group):
        self.journal.scored([group])


@dataclass
class Checkpoint:
    step: int = 0
    cursor: dict | None = None
    facts: dict = field(default_factory=lambda: {"pending": []})
    groups: tuple[Group, ...] = ()
    version: int = 0


class Run:
    """One run over all its processes. `batches`, `engine`, `rewards` are those of the steps that counted."""

    def __init__(self, schedule):
        self.schedule, self.clock = schedule, VirtualClock()
        self.journal = RestoredJournal(":memory:", self.clock)
        self.batches: list[CollectedBatch] = []
        self.saved = Checkpoint()
        self.most = self.killed = 0
        self.make_engine, self.snapshots, self.waited = Engine, [], []
        self.metrics, self.shown = [], []
        self.draw = random.Random(f"run {schedule.seed}")

    def go(self):
        """Until all steps are done, killed `kills` times on the way."""
        longest = (self.schedule.train_seconds + 3.0) * self.schedule.steps
        for left in range(self.schedule.kills, -1, -1):
            seconds = self.draw.uniform(0.0, longest) if left else None
            if run_virtually(self._process(seconds), self.clock):
                break
            self.killed += 1
        return self

    async def _process(self, seconds):
        """True when the run is done; killed after so many seconds."""
        self.engine, self.rewards = self.make_engine(self.schedule), Rewards(self.schedule)
        collector = self._resumed()
        task = asyncio.ensure_future(self._train(collector))
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if done:
                task.result()
            return bool(done)
        finally:
            task.cancel()
            collector.abandon()
            self.most = max(self.most, self.engine.most)

    def _resumed(self):
        saved, schedule, source = self.saved, self.schedule, Source()
        self.journal.rewind(saved.step)
        del self.batches[saved.step :]
        if saved.cursor is not None:
            source.load(saved.cursor)
        self.engine.version = saved.version
        pending = Pending.of(saved.facts, saved.groups, source.prompts_for(saved.facts.get("in_flight", [])))
        prompts = [*(group.prompt for group in pending.groups), *pending.prompts]
        self.journal.generating(prompt.uid for prompt in prompts)
        self.journal.scored(g for g in pending.groups if g.prompt.uid not in pending.unjudged)
        spec = GroupSpec(sampling=Sampling(), completions=schedule.completions, seed=1, greedy_baseline=schedule.greedy)
        limit = DynamicSampling(max_num_gen_batches=schedule.gen_batches, exhausted=schedule.exhausted)
        bounds = ("prompts", "concurrent", "max_lag", "steps", "over_age")
        return AsyncCollector(
            GroupGenerator(self.engine, self.rewards, spec, self.clock.now),
            source,
            InFlightLimit(**{name: getattr(schedule, name) for name in bounds}),
            refill=Refill(sampling=limit, reject=self._reject) if schedule.rejected else None,
            listener=Recorder(self.journal, self.shown),
            pending=pending,
            finished=saved.step,
        )

    async def _reject(self, groups):
        await asyncio.sleep(0.5)
        rejected = [g.prompt.uid for g in groups if self._chance("reject", g.prompt.uid) < self.schedule.rejected]
        return dict.fromkeys(rejected, "uniform")

    def _chance(self, what, number):
        return random.Random(f"{what} {self.schedule.seed} {number}").random()

    async def _train(self, collector):
        """The controller's loop: collect, train, publish, finish, save; evaluations between the steps take time too."""
        while (step := self.journal.step + 1) <= self.schedule.steps:
            version, began = self.engine.version, self.clock.now()
            batch = await collector.collect(version)
            self.waited.append(self.clock.now() - began)
            self.assert_unconsumed(collector, batch)
            await asyncio.sleep(self.schedule.train_seconds * (1 + self._chance("train", step)))
            kept = [g.prompt.uid for g in batch.groups]
            self.journal.select(step, kept, {g.prompt.uid: reason for g, reason in batch.dropped})
            if self._chance("fruitless", step) >= self.schedule.fruitless:
                self.engine.sampling.clear()
                collector.engine_paused()
                await asyncio.sleep(0.3)
                self.engine.version += 1
                self.engine.sampling.set()
                collector.engine_resumed()
            await asyncio.sleep(0.1)  # files
            cursor, pending = collector.state(), collector.pending()
            self.journal.consume(step, cursor, {}, version=self.engine.version)
            self.batches.append(batch)
            self.snapshots.append(pending)
            metrics = collector.step_metrics({"generate": 1.0, "step": 2.0})
            assert 0 <= metrics["idle/engine"] <= 1
            self.metrics.append(metrics)
            if step % self.schedule.checkpoint_every == 0:
                await asyncio.sleep(1.0)  # an evaluation, while others are enqueued
                self.saved = Checkpoint(step, cursor, pending.facts(), pending.groups, self.engine.version)

    def assert_unconsumed(self, collector, batch):
        keys = [(prompt.uid, completion.sample) for prompt, completion in collector.unconsumed()]
        taken = {g.prompt.uid for g in (*batch.groups, *(group for group, _ in batch.dropped))}
        assert len(keys) == len(set(keys)) and taken.isdisjoint(uid for uid, _ in keys)
        assert all(sample < self.schedule.completions for _, sample in keys)
        assert collector.pending().rejected.keys().isdisjoint(uid for uid, _ in keys)

    def assert_whole(self):
        """Nothing is lost or doubled, and no bound is passed."""
        schedule, consumed = self.schedule, [[g.prompt.uid for g in batch.groups] for batch in self.batches]
        used = [uid for uids in consumed for uid in uids]
        dropped = [group.prompt.uid for batch in self.batches for group, _ in batch.dropped]
        assert len(consumed) == schedule.steps == self.journal.step
        assert len({*used, *dropped}) == len(used) + len(dropped)
        assert self.most <= schedule.concurrent
        assert all(self._chance("reject", uid) >= schedule.rejected for uid in used)
        partial = bool(schedule.rejected and schedule.gen_batches)
        if not partial:  # each rejected and each evicted group was replaced by exactly one
            assert all(len(uids) == schedule.prompts for uids in consumed)
            assert sorted(used + dropped) == list(range(len(used) + len(dropped)))
            assert self.journal.counts() == {"consumed": len(used) + len(dropped)}
        states = {record.uid: record.state for record in prompt_rows(self.journal)}
        assert sorted(states) == list(range(len(states)))  # each prompt of the cursor is known
        assert all(states[uid] == "consumed" for uid in used + dropped)
        if schedule.over_age != "train":
            ages = [group_age(group, batch.version) for batch in self.batches for group in batch.groups]
            assert max(ages) <= schedule.max_lag if ages else True
        if schedule.over_age == "wait":
            assert used == sorted(used)
            stale = [reason for batch in self.batches for _, reason in batch.dropped if reason == "stale"]
            assert partial or not stale  # a step that takes fewer groups makes the others wait for longer
        carried = 0
        for batch in self.batches:  # carried in + generated = used + dropped + carried out
            assert carried + len(batch.generated) == len(batch.groups) + len(batch.dropped) + len(batch.carried)
            carried = len(batch.carried)
        if schedule.batch_reward:
            scores = [entry for batch in self.batches for g in batch.groups for entry in enumerate(g.scores)]
            assert all(score.value == 10.0 + i for i, score in scores if score.valid)  # added once
