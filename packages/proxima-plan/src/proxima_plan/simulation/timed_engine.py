"""One or several engines that take the time of continuous batching and compute nothing, behind one `Engine`."""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from proxima.config.schema import RunConfig
from proxima.data.flow import Completion
from proxima.engine.local.scheduler import worth_a_prefill
from proxima.engine.protocol import Capabilities, Health, PauseMode, Request, WeightUpdate
from proxima.runtime.launch.rl_workload import training_groups
from proxima_plan.simulation.times import Times

ROUNDING = 1e-6  # tokens: sums of floating-point times are not exact


@dataclass(eq=False)
class TimedGroup:
    """The completions of a prompt. The caller gets them as one, with the tokens of all that are trained on, as soon as
    the last one ends: nothing in a run depends on which of them has which token.

    Args:
        lengths: tokens of each completion. trained: how many are trained on; a greedy one, the last, is not.
        versions: of the tokens of each that has ended: versions of the weights, and the number of tokens.
    """

    request: Request
    sink: "asyncio.Queue[Completion]"
    lengths: Sequence[int]
    trained: int
    versions: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def completion(self) -> Completion:
        """Return the completions as one."""
        total = sum(self.lengths[: self.trained])
        runs = []
        for sample in range(self.trained):
            runs += self.versions[sample]
        versions, tokens = np.array(runs, np.int32).T
        mixed = versions.min() < versions.max()
        return Completion(
            prompt_uid=self.request.prompt.uid,
            sample=0,
            tokens=np.broadcast_to(np.int32(0), total),
            text="",
            sampled_log_prob=np.broadcast_to(np.float32(0), total),
            untruncated_log_prob=np.broadcast_to(np.float32(0), total),
            policy_version=np.repeat(versions, tokens) if mixed else np.broadcast_to(versions[0], total),
            finish_reason="stop",
            temperature=self.request.sampling.temperature,
        )


@dataclass(eq=False)
class TimedCompletion:
    """A waiting or running completion. `begin` is the progress of its replica when it was admitted."""

    group: TimedGroup
    sample: int
    length: int
    begin: float = 0.0


class TimedEngine:
    """See `Engine`. A prompt goes with all its completions to the replica with the fewest that has room; others wait in
    one queue. All replicas receive new weights at once.

    Args:
        config: of the groups, and what happens at new weights. A request stands for all completions of its prompt.
        replicas, slots: the number of engines, and the completions that each runs at once.
    """

    capabilities = Capabilities(pause_modes=frozenset({"keep"}))

    def __init__(self, config: RunConfig, times: Times, replicas: int, slots: int, now: Callable[[], float]) -> None:
        self.times = times
        self.slots = slots
        self.now = now
        self.spec = training_groups(config)
        self.interrupt = getattr(config.engine, "interrupt", "recompute")
        self.version = self.running = 0
        self.waiting: deque[TimedGroup] = deque()
        self.replicas = [TimedReplica(self) for _ in range(replicas)]
        self._paused = self._drains = self._held = self._admits = False
        self._empty = asyncio.Event()

    @property
    def decodes(self) -> bool:
        return not self._held and (self._drains or not self._paused)

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion, None]:
        done: asyncio.Queue[Completion] = asyncio.Queue()
        trained = self.spec.completions
        self.waiting.extend(TimedGroup(one, done, self.lengths(one.prompt.uid), trained) for one in requests)
        self._admit()
        remaining = len(requests)
        try:
            while remaining:
                completion = await done.get()
                remaining -= 1
                yield completion
        finally:
            if remaining:
                self._discard(done)

    def lengths(self, uid: int) -> list[int]:
        """The tokens of each completion of a prompt."""
        seed = self.spec.seed
        most = self.times.load.longest
        drawn = (round(self.times.length(seed, uid, sample)) for sample in range(self.spec.size))
        return [max(1, min(length, most)) for length in drawn]

    def _discard(self, sink: "asyncio.Queue[Completion]") -> None:
        """Drop the completions of a caller that no longer waits for them."""
        self.waiting = deque(group for group in self.waiting if group.sink is not sink)
        for replica in self.replicas:
            replica.discard(sink)
        self._admit()

    def _admit(self) -> None:
        """Give waiting prompts to replicas with room; a replica that takes one calls this again."""
        if self._admits or self._paused or self._held:
            return
        self._admits = True
        while self.waiting:
            free = [replica for replica in self.replicas if replica.has_room]
            if not free:
                break
            min(free, key=lambda replica: replica.held).take(self.waiting.popleft())
        self._admits = False

    async def publish(self, update: WeightUpdate) -> None:
        if self.interrupt == "finish":
            self._switch(drains=True)
            while self.running:
                self._empty.clear()
                await self._empty.wait()
            self._switch(drains=False)
        await asyncio.sleep(self.times.publish)
        self.version = update.version
        for replica in self.replicas:
            replica.load(update.version)

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._switch(paused=True)

    async def resume(self) -> None:
        self._switch(paused=False)

    async def health(self) -> Health:
        return Health(ok=True, version=self.version, running=self.running, waiting=len(self.waiting))

    def hold(self, on: bool) -> None:
        """Stop decoding, or go on: the trainer needs the thread that this engine decodes in."""
        self._switch(held=on)

    def _switch(self, **flags: bool) -> None:
        for replica in self.replicas:
            replica.advance()
        for name, on in flags.items():
            setattr(self, f"_{name}", on)
        for replica in self.replicas:
            replica.settle()

    def settled(self, replica: "TimedReplica", more: int) -> None:
        """Count `more` running completions of a replica, and give it the next prompt."""
        self.running += more
        if not self.running:
            self._empty.set()
        if replica.has_room:
            self._admit()


class TimedReplica:
    """A replica of a `TimedEngine`. All running completions advance together: `progress` counts the tokens of a
    completion running since the start, so a completion ends at the progress of its admission plus its length."""

    def __init__(self, engine: TimedEngine) -> None:
        self.engine = engine
        self.pending: deque[TimedCompletion] = deque()  # of a prompt that has been read
        self.running: dict[TimedCompletion, None] = {}
        self.progress = 0.0
        self.at = engine.now()
        self.stalled_until = 0.0
        self.versions: list[tuple[float, int]] = [(0.0, 0)]  # progress, and the version of the tokens from then on
        self._ends: list[tuple[float, int, TimedCompletion]] = []  # a heap, by progress
        self._numbers = count()
        self._known = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held(self) -> int:
        return len(self.running) + len(self.pending)

    @property
    def has_room(self) -> bool:
        return not self.pending and worth_a_prefill(self.engine.slots - len(self.running), self.engine.slots)

    def take(self, group: TimedGroup) -> None:
        """Read a prompt and start its completions."""
        self.advance()
        self.pending.extend(TimedCompletion(group, sample, length) for sample, length in enumerate(group.lengths))
        self._stall(len(group.request.prompt.tokens))
        self.settle()

    def discard(self, sink: "asyncio.Queue[Completion]") -> None:
        self.advance()
        for completion in [running for running in self.running if running.group.sink is sink]:
            del self.running[completion]
        if self.pending and self.pending[0].group.sink is sink:
            self.pending.clear()
        self.settle()

    def load(self, version: int) -> None:
        """Use the weights of `version` for all further tokens."""
        self.advance()
        self.versions.append((self.progress, version))
        if self.engine.interrupt == "recompute":
            self._stall(sum(len(one.group.request.prompt.tokens) + self._tokens(one) for one in self.running))
        self.settle()

    def advance(self) -> None:
        """Add the tokens sampled since the last call to the running completions."""
        now = self.engine.now()
        if self.running and self.engine.decodes:
            seconds = max(0.0, now - max(self.at, self.stalled_until))
            self.progress += seconds / self.engine.times.decode_step(len(self.running))
        self.at = now

    def settle(self) -> None:
        """Deliver ended completions, start pending ones, and set a timer for the next end."""
        self.advance()
        while self._ends and (self._ends[0][2] not in self.running or self._ends[0][0] <= self.progress + ROUNDING):
            completion = heapq.heappop(self._ends)[2]
            if completion in self.running:
                self._deliver(completion)
        while self.pending and len(self.running) < self.engine.slots and self.engine.decodes:
            completion = self.pending.popleft()
            completion.begin = self.progress
            self.running[completion] = None
            heapq.heappush(self._ends, (self.progress + completion.length, next(self._numbers), completion))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.running and self.engine.decodes:
            left = (self._ends[0][0] - self.progress) * self.engine.times.decode_step(len(self.running))
            delay = max(0.0, self.stalled_until - self.at) + max(0.0, left)
            self._timer = asyncio.get_running_loop().call_later(delay, self.settle)
        before = self._known
        self._known = len(self.running)
        self.engine.settled(self, self._known - before)

    def _stall(self, tokens: int) -> None:
        """Stop decoding while `tokens` tokens are prefilled."""
        self.stalled_until = max(self.stalled_until, self.at) + self.engine.times.prefill(tokens)

    def _tokens(self, completion: TimedCompletion) -> int:
        return min(int(self.progress - completion.begin + ROUNDING), completion.length)

    def _deliver(self, completion: TimedCompletion) -> None:
        group = completion.group
        del self.running[completion]
        group.versions[completion.sample] = self._versions(completion)
        if len(group.versions) == len(group.lengths):
            group.sink.put_nowait(group.completion())

    def _versions(self, completion: TimedCompletion) -> list[tuple[int, int]]:
        """Versions of the weights at the start of the decode steps of a completion, and its tokens of each."""
        runs = list[tuple[int, int]]()
        end = completion.length
        for progress, version in reversed(self.versions):
            first = min(end, max(0, math.ceil(progress - completion.begin - ROUNDING)))
            if first < end:
                runs.append((version, end - first))
            end = first
            if end == 0:
                break
        return runs
