"""Stand-ins for data, rewards, trainer and store in a simulated run, which only take time.

Each class implements a protocol of the house; advantages, selection, updates and checkpoints of a real run call them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from proxima.core.aggregate import TokenMean
from proxima.core.distillation import NoPolicyGradient
from proxima.data import Completion, Group, Outcomes, Prompt, Score, Trajectory
from proxima.data.columns import Bools
from proxima.data.episode import EpisodeLife
from proxima.data.random import SIMULATED_VERDICT, mix
from proxima.engine.protocol import Engine, InFlight, Request
from proxima.lab.simulate.timed_engine import TimedEngine
from proxima.lab.simulate.timed_replica import constant_column
from proxima.lab.simulate.times import Times
from proxima.model.compute_thread import Progress
from proxima.rollout.episodes.played import EpisodeTimes, next_arrival, sampled_turn, sampled_turns
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.watch.activity import Activity
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.disk import Disk
from proxima.runtime.watch.timeline import Timeline
from proxima.train import PolicyObjective, UpdateResult
from proxima.train.learner import Learner

T = TypeVar("T")


class TimedThread:
    """A `Compute`: calls run one after the other, and each takes as long as it says by `spend`. An `engine` decodes in
    this very thread; None: it has a process of its own."""

    def __init__(self, engine: TimedEngine | None, now: Callable[[], float]) -> None:
        self.engine, self.now = engine, now
        self.trace: list[tuple[float, float]] = []  # from when to when the trainer worked
        self._turn, self._owed = asyncio.Lock(), 0.0

    def spend(self, seconds: float) -> None:
        """The call that is running takes so much longer."""
        self._owed += seconds

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        async with self._turn:
            result = call(*arguments)
            seconds, self._owed = self._owed, 0.0
            if seconds:
                begin = self.now()
                if self.engine is not None:
                    self.engine.hold()
                try:
                    await asyncio.sleep(seconds)
                finally:
                    if self.engine is not None:
                        self.engine.release()
                self.trace.append((begin, self.now()))
            return result

    async def run_with_progress(self, call: Callable[[Progress], T], report: Progress) -> T:
        return await self.run(call, report)


class TimedPrompts:
    """A `PromptSource` without rows that never ends."""

    rows = ()
    replays = False

    def __init__(self, length: float) -> None:
        self.tokens, self.uid = np.broadcast_to(np.int32(0), round(length)), 0

    def next(self, n: int) -> list[Prompt]:
        first, self.uid = self.uid, self.uid + n
        return [Prompt(uid=uid, messages=(), tokens=self.tokens) for uid in range(first, self.uid)]

    def state(self) -> dict[str, Any]:
        return {"uid": self.uid}


class TimedEpisodes:
    """An `EpisodePlayer` whose environments only take time: an episode has as many turns as are drawn, each generated
    by the engine and answered after a while."""

    def __init__(self, engine: Engine, times: Times, seed: int) -> None:
        self.engine, self.drawn, self.seed = engine, times, seed
        self.listener: Callable[[EpisodeLife], None] = lambda life: None
        self.times = EpisodeTimes()

    def taken(self) -> dict[str, float]:
        return self.times.taken()

    def unfinished(self, running: Sequence[InFlight]) -> list[tuple[InFlight, Bools]]:
        """None: nobody reads the tokens of a simulation."""
        return []

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        arrivals: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        by_key = {(request.prompt.uid, request.sample): request for request in requests}
        clock = asyncio.get_running_loop().time
        tasks: list[asyncio.Task[None]] = []
        begin = clock()

        async def first_turns() -> None:
            async with aclosing(sampled_turns(self.engine, requests, self.times)) as stream:
                async for completion in stream:
                    request = by_key[completion.prompt_uid, completion.sample]
                    tasks.append(asyncio.create_task(play(request, completion)))

        async def play(request: Request, first: Completion) -> None:
            uid, sample = request.prompt.uid, request.sample
            parts, waits = [first], [(begin, clock())]
            for turn in range(1, round(self.drawn.turns.draw(self.seed, uid, sample))):
                await self._answered(uid, sample, turn)
                asked = clock()
                parts.append(await sampled_turn(self.engine, replace(request, turn=turn), self.times))
                waits.append((asked, clock()))
            await self._answered(uid, sample, 0)
            self.times.ended(EpisodeLife(uid, sample, begin, clock(), waits), self.listener)
            arrivals.put_nowait(_joined(parts))

        tasks.append(asyncio.create_task(first_turns()))
        try:
            for _ in requests:
                yield await next_arrival(arrivals)
        finally:
            for task in tasks:
                task.cancel()

    async def _answered(self, uid: int, sample: int, turn: int) -> None:
        if self.drawn.environment is not None:
            seconds = self.drawn.environment.draw(mix(self.seed, turn), uid, sample)
            self.times.environment += seconds
            await asyncio.sleep(seconds)


def _joined(parts: Sequence[Completion]) -> Completion:
    """The turns of an episode as one completion."""
    whole = sum(len(part.tokens) for part in parts)
    return replace(
        parts[-1],
        turn=0,
        tokens=constant_column(0, np.int32, whole),
        sampled_log_prob=constant_column(0, np.float32, whole),
        untruncated_log_prob=constant_column(0, np.float32, whole),
        policy_version=np.concatenate([part.policy_version for part in parts]),
    )


class TimedRewards:
    """A `GroupScorer`: every group is scored when its time is over."""

    def __init__(self, times: Times, seed: int, *, whole_batch: bool) -> None:
        self.times, self.seed, self.has_batch = times, seed, whole_batch
        self.awaited: dict[str, list[int]] = {}

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        await asyncio.sleep(self.times.score.draw(self.seed, prompt.uid, 0))
        return [Score(value=0.0)] * len(completions)

    async def score_batch(self, groups: Sequence[Group]) -> list[Group]:
        return list(groups)

    def close(self) -> None: ...


class TimedEvaluation:
    """A `HeldOut` without questions."""

    others: Mapping[str, "TimedEvaluation"] = {}

    def __init__(self, times: Times, thread: TimedThread, generator: GroupGenerator) -> None:
        self.times, self.thread, self.generator = times, thread, generator

    async def groups(self) -> list[Group]:
        await self.thread.run(self.thread.spend, self.times.evaluate)
        return []


class TimedAdvantage:
    """0 for every completion, after the time of all that a step does outside rollout, update and publishing."""

    per_token = False

    def __init__(self, times: Times, thread: TimedThread) -> None:
        self.times, self.thread = times, thread

    def __call__(self, outcomes: Outcomes) -> Tensor:
        self.thread.spend(self.times.other)
        return torch.zeros_like(outcomes.reward)


def timed_reject(times: Times, seed: int, groups: Sequence[Group]) -> dict[int, str]:
    """Dynamic sampling keeps a share of the groups: uid → reason of the others."""
    limit = times.accepted * 2**64
    return {group.prompt.uid: "rejected" for group in groups if mix(SIMULATED_VERDICT, seed, group.prompt.uid) >= limit}


class TimedStack:
    """The part of a `TrainStack` that a learner calls: an update takes its time and changes nothing."""

    def __init__(self, times: Times, thread: TimedThread) -> None:
        self.times, self.thread = times, thread

    def gathered(self) -> Any:
        return SimpleNamespace(model=nn.Identity())

    def fill(self, stages: Any, trajectories: Sequence[Any]) -> list[Any]:
        return list(trajectories)

    def update(self, objective: Any, updates: Sequence[Sequence[Trajectory]], *rest: Any) -> UpdateResult:
        if not updates:
            return UpdateResult()
        lengths = [len(item.tokens) for items in updates for item in items]
        self.thread.spend(self.times.update_step(lengths))
        return UpdateResult(tokens=sum(lengths), updates=1)


def timed_learner(times: Times, thread: TimedThread) -> Learner:
    """A learner of weights that nobody computes."""
    return Learner(
        policy=cast(Any, SimpleNamespace(loaded=None, value_head=None)),
        stack=cast(Any, TimedStack(times, thread)),
        objective=PolicyObjective(surrogate=NoPolicyGradient(), aggregate=TokenMean()),
        compute=thread,
    )


class RecordsInMemory:
    """A `Store` that keeps the records of metrics.jsonl; a checkpoint only takes time. No file is written to `folder`
    but the timeline."""

    def __init__(self, journal: Journal, folder: RunFolder, clock: Clock, checkpoint: Callable[[], None]) -> None:
        self.journal, self.folder, self.checkpoint = journal, folder, checkpoint
        self.disk = Disk(folder.path, lambda text: None)
        self.activity = Activity(clock, 0.0, Timeline(folder.timeline, lambda text: None))
        self.records: list[dict[str, Any]] = []

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))

    def finish_checkpoint(self) -> None: ...

    def write_rollouts(self, step: int, groups: Any, records: Any) -> None: ...

    def write_evals(self, step: int, label: str, groups: Any) -> None: ...

    def write_checkpoint(self, step: int, loaded: Any, stack: Any, facts: Any, files: Any, others: Any) -> None:
        self.checkpoint()

    def prune_checkpoints(self, keep_last: int, *, keep_best: bool) -> None: ...
