"""What stands in for data, rewards, selection and trainer in a simulated run: all of it only takes time."""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
from torch import nn

from proxima.data import Completion, Group, Prompt, Score
from proxima.data.flow import Key
from proxima.data.random import SIMULATED_VERDICT, mix
from proxima.lab.simulate.timed_engine import TimedEngine
from proxima.lab.simulate.times import Times
from proxima.model.compute_thread import ComputeThread, Progress
from proxima.reward.runner import RewardRunner
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.store import RunStore
from proxima.train import TokenStatistics, UpdateResult
from proxima.train.batch_builder import Algorithm, StepBatch
from proxima.train.completion_record import CompletionRecord
from proxima.train.learner import Learner

T = TypeVar("T")


class TimedThread(ComputeThread):
    """Calls run one after the other, and each takes as long as it says by `spend`. An `engine` decodes in this very
    thread; None: it has a process of its own."""

    def __init__(self, engine: TimedEngine | None, now: Callable[[], float]) -> None:
        super().__init__()
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


class TimedPrompts:
    """A `PromptSource` without rows that never ends."""

    rows = ()

    def __init__(self, length: float) -> None:
        self.tokens, self.uid = np.broadcast_to(np.int32(0), round(length)), 0

    def next(self, n: int) -> list[Prompt]:
        first, self.uid = self.uid, self.uid + n
        return [Prompt(uid=uid, messages=(), tokens=self.tokens) for uid in range(first, self.uid)]

    def state(self) -> dict[str, Any]:
        return {"uid": self.uid}


class TimedRewards(RewardRunner):
    """Every group is scored when its time is over."""

    def __init__(self, times: Times, seed: int, *, whole_batch: bool) -> None:
        self.times, self.seed, self.whole_batch = times, seed, whole_batch

    @property
    def has_batch(self) -> bool:
        return self.whole_batch

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        await asyncio.sleep(self.times.score.draw(self.seed, prompt.uid, 0))
        return [Score(value=0.0)] * len(completions)

    async def score_batch(self, groups: Sequence[Group]) -> list[Group]:
        return list(groups)

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TimedBatch(StepBatch):
    """A batch without trajectories: every group that the step uses is trained."""

    @property
    def kept(self) -> list[int]:
        return [group.prompt.uid for group in self.groups if group.prompt.uid not in self.unused]

    @property
    def dropped(self) -> dict[int, str]:
        return {group.prompt.uid: self.reasons[group.completions[0].key] for group in self.groups[len(self.kept) :]}

    @property
    def tokens(self) -> int:
        """Of the completions that are trained."""
        return sum(len(c.tokens) for group in self.groups[: len(self.kept)] for c in group.completions)

    def records(self, statistics: Mapping[int, TokenStatistics]) -> dict[Key, CompletionRecord]:
        return {}


@dataclass(frozen=True, kw_only=True)
class TimedAlgorithm(Algorithm):
    """Dynamic sampling keeps a share of the groups; advantages and selection take a constant time."""

    times: Times
    thread: TimedThread

    def reject(self, groups: Sequence[Group]) -> dict[int, str]:
        limit = self.times.accepted * 2**64
        return {
            group.prompt.uid: "rejected"
            for group in groups
            if mix(SIMULATED_VERDICT, self.seed, group.prompt.uid) >= limit
        }

    def step_batch(self, groups: Sequence[Group], step: int, dropped: Sequence[tuple[Group, str]] = ()) -> StepBatch:
        self.thread.spend(self.times.other)
        return TimedBatch(
            groups=(*groups, *(group for group, _ in dropped)),
            unused={group.prompt.uid for group, _ in dropped},
            advantage={},
            reasons={completion.key: reason for group, reason in dropped for completion in group.completions},
            trajectories=(),
            updates=((),),
            step=step,
        )


@dataclass(frozen=True, kw_only=True)
class TimedLearner(Learner):
    """Weights that nobody computes."""

    times: Times
    thread: TimedThread

    @classmethod
    def of(cls, times: Times, thread: TimedThread) -> "TimedLearner":
        nothing = cast(Any, SimpleNamespace(model=nn.Identity(), loaded=None, value_head=None))
        return cls(policy=nothing, stack=nothing, objective=nothing, compute=thread, times=times, thread=thread)

    def update(self, batch: StepBatch, version: int, progress: Progress, *, own: bool = True) -> UpdateResult:
        assert isinstance(batch, TimedBatch)
        if not batch.kept:
            return UpdateResult()
        self.thread.spend(self.times.update + self.times.update_token * batch.tokens)
        return UpdateResult(tokens=batch.tokens, updates=1)

    def reject_mismatched(self, batch: StepBatch) -> StepBatch:
        return batch

    def fill(self, trajectories: Sequence[Any], columns: Set[str]) -> list[Any]:
        return list(trajectories)


class RecordsInMemory(RunFolder):
    """A run folder whose records stay in memory."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.records: list[dict[str, Any]] = []

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))

    def read_metrics(self) -> list[dict[str, Any]]:
        return self.records


class NoRollouts(RunStore):
    """Keeps no completions."""

    def write_rollouts(self, step: int, groups: Sequence[Group], records: Mapping[Key, CompletionRecord]) -> None: ...
