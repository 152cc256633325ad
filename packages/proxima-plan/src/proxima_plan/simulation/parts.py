"""Replacements for data, rewards, trainer and store in a simulated run that only take time.

Each class implements a protocol of proxima; advantages, selection, updates and checkpoints of a real run call them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.outcomes import Outcomes
from proxima.data.pending import Judgement
from proxima.data.random import SIMULATED_VERDICT, mix
from proxima.model.compute_thread import ComputeThread, T
from proxima.runtime.loop.training_loop import Stopped
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.store import RunStore
from proxima.runtime.watch.activity import Activity
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.disk import Disk
from proxima.runtime.watch.timeline import Timeline
from proxima.training.stack import UpdateResult
from proxima_plan.simulation.timed_engine import TimedEngine
from proxima_plan.simulation.times import Times


class TimedThread(ComputeThread):
    """Where work only takes time: calls run one after the other, and each takes what it passes to `spend`.

    `shared`: the engine decodes in this same thread; else it has its own process.
    """

    def __init__(self, engine: TimedEngine, *, shared: bool) -> None:
        super().__init__()
        self.engine = engine
        self.shared = shared
        self._turn = asyncio.Lock()
        self._owed = 0.0

    def spend(self, seconds: float) -> None:
        """Make the running call take `seconds` longer."""
        self._owed += seconds

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        async with self._turn:
            result = call(*arguments)
            seconds = self._owed
            self._owed = 0.0
            if seconds and self.shared:
                self.engine.hold(True)
            await asyncio.sleep(seconds)
            if seconds and self.shared:
                self.engine.hold(False)
            return result


class TimedPrompts:
    """A `PromptSource` without rows that never ends."""

    rows = ()
    replays = False
    pool = None

    def __init__(self, length: float) -> None:
        self.tokens = np.broadcast_to(np.int32(0), round(length))
        self.uid = 0

    def next(self, n: int) -> list[Prompt]:
        first = self.uid
        self.uid = self.uid + n
        return [Prompt(uid=uid, messages=(), tokens=self.tokens) for uid in range(first, self.uid)]

    def state(self) -> dict[str, Any]:
        return {"uid": self.uid}

    def judged(self, judgements: Mapping[int, Judgement]) -> None: ...


class TimedRewards:
    """The rewards as a generator uses them: every group is scored when its time is over."""

    def __init__(self, times: Times, *, whole_batch: bool) -> None:
        self.times = times
        self.has_batch = whole_batch
        self.awaited: dict[str, list[int]] = {}

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        await asyncio.sleep(self.times.assumed.score)
        return [Score(value=0.0)] * len(completions)

    async def score_batch(self, groups: Sequence[Group]) -> list[Group]:
        return list(groups)

    def close(self) -> None: ...


class TimedAdvantage:
    """Advantages of 0, after the time that a step spends outside rollout, update and publication."""

    per_token = False

    def __init__(self, thread: TimedThread) -> None:
        self.thread = thread

    def __call__(self, outcomes: Outcomes) -> Tensor:
        self.thread.spend(self.thread.engine.times.other)
        return torch.zeros_like(outcomes.reward)


def timed_reject(times: Times, seed: int, groups: Sequence[Group]) -> dict[int, str]:
    """Reject groups so that dynamic sampling keeps the share `accepted`; return uid → reason."""
    limit = times.assumed.accepted * 2**64
    return {group.prompt.uid: "rejected" for group in groups if mix(SIMULATED_VERDICT, seed, group.prompt.uid) >= limit}


class TimedStack:
    """The methods of a `TrainStack` that a learner calls: an update takes its time and changes nothing. The engine
    knows the completions that an item stands for."""

    changes = 0

    def __init__(self, thread: TimedThread) -> None:
        self.thread = thread

    def gathered(self) -> Any:
        return SimpleNamespace(model=nn.Identity())

    def fill(self, stages: Any, trajectories: Sequence[Any]) -> list[Any]:
        return list(trajectories)

    def update(self, objective: Any, updates: Sequence[Sequence[Any]], *rest: Any) -> UpdateResult:
        if not updates:
            return UpdateResult()
        engine = self.thread.engine
        groups = [engine.lengths(item.uid)[: engine.spec.completions] for items in updates for item in items]
        lengths = [length for group in groups for length in group]
        self.thread.spend(engine.times.training(lengths))
        return UpdateResult(tokens=sum(lengths), updates=1)


class RecordsInMemory(RunStore):
    """A store that keeps the records of steps in memory, and ends the run after `most` of them. Only the timeline is
    written to `folder`."""

    def __init__(self, journal: Journal, folder: RunFolder, clock: Clock, most: int) -> None:
        activity = Activity(clock, 0.0, Timeline(folder.timeline, lambda text: None))
        super().__init__(journal, folder, Disk(folder.path, lambda text: None), activity)
        self.steps = list[dict[str, Any]]()
        self.most = most

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        self.steps.append(dict(record))
        if len(self.steps) == self.most:
            raise Stopped

    def write_rollouts(self, step: int, groups: Any, records: Any) -> None: ...
