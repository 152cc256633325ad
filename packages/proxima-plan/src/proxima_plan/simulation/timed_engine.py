"""One or several engines that take the time of continuous batching and compute nothing, behind one `Engine`."""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

import numpy as np

from proxima.data import Completion, FinishReason
from proxima.data.columns import Ints
from proxima.engine.protocol import Capabilities, Health, Interrupt, PauseMode, Request, WeightUpdate
from proxima.engine.scheduler import worth_admitting
from proxima_plan.simulation.times import Times

ROUNDING = 1e-6  # tokens: sums of floating-point times are not exact
HELD = attrgetter("held")


@dataclass(eq=False)
class TimedCompletion:
    """A waiting or running completion. `begin` is the progress of its replica when it was admitted."""

    request: Request
    sink: "asyncio.Queue[Completion]"
    length: int
    reason: FinishReason
    begin: float = 0.0
    ended: bool = False


class TimedEngine:
    """See `Engine`. A prompt goes with all its completions to the replica with the fewest that has room; others wait in
    one queue. All replicas receive new weights at once.

    Args:
        replicas, slots: the number of engines, and the completions that each runs at once.
        interrupt: see `Local`. seed: of the lengths.
    """

    capabilities = Capabilities(weight_updates=frozenset({"module"}), pause_modes=frozenset({"keep"}))

    def __init__(
        self, times: Times, replicas: int, slots: int, *, interrupt: Interrupt, seed: int, now: Callable[[], float]
    ) -> None:
        self.times, self.slots, self.interrupt, self.seed, self.now = times, slots, interrupt, seed, now
        self.version = self.running = 0
        self.waiting: deque[deque[TimedCompletion]] = deque()  # by prompt
        self.replicas = [TimedReplica(self) for _ in range(replicas)]
        self._paused = self._drains = self._held = self._admits = False
        self._empty = asyncio.Event()

    @property
    def decodes(self) -> bool:
        return not self._held and (self._drains or not self._paused)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        done: asyncio.Queue[Completion] = asyncio.Queue()
        prompts: dict[int, deque[TimedCompletion]] = {}
        for request in requests:
            prompts.setdefault(request.prompt.uid, deque()).append(self._completion(request, done))
        self.waiting.extend(prompts.values())
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

    def _completion(self, request: Request, sink: "asyncio.Queue[Completion]") -> TimedCompletion:
        most = request.sampling.max_tokens
        wanted = round(self.times.length(self.seed, request.prompt.uid, request.sample))
        return TimedCompletion(request, sink, max(1, min(wanted, most)), "length" if wanted > most else "stop")

    def _discard(self, sink: "asyncio.Queue[Completion]") -> None:
        """Drop the completions of a caller that no longer waits for them."""
        self.waiting = deque(prompt for prompt in self.waiting if prompt[0].sink is not sink)
        for replica in self.replicas:
            replica.discard(sink)
        self._admit()

    def _admit(self) -> None:
        """Give waiting prompts to replicas with room; a replica that takes one calls this again."""
        if self._admits or self._paused or self._held:
            return
        self._admits = True
        while self.waiting:
            home = min((replica for replica in self.replicas if replica.has_room), key=HELD, default=None)
            if home is None:
                break
            home.take(self.waiting.popleft())
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
        return Health(ok=True, version=self.version, running=self.running, waiting=sum(map(len, self.waiting)))

    def hold(self) -> None:
        """Stop decoding: the trainer needs the thread that this engine decodes in."""
        self._switch(held=True)

    def release(self) -> None:
        self._switch(held=False)

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
        self.progress, self.at, self.stalled_until = 0.0, engine.now(), 0.0
        self.versions: list[tuple[float, int]] = [(0.0, 0)]  # progress, and the version of the tokens from then on
        self._ends: list[tuple[float, int, TimedCompletion]] = []  # a heap, by progress
        self._numbers, self._known = count(), 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held(self) -> int:
        return len(self.running) + len(self.pending)

    @property
    def has_room(self) -> bool:
        return not self.pending and worth_admitting(self.engine.slots - len(self.running), self.engine.slots)

    def take(self, prompt: deque[TimedCompletion]) -> None:
        """Read a prompt and start its completions."""
        self.advance()
        self.pending = prompt
        self._stall(len(prompt[0].request.prompt.tokens))
        self.settle()

    def discard(self, sink: "asyncio.Queue[Completion]") -> None:
        self.advance()
        for completion in [running for running in self.running if running.sink is sink]:
            completion.ended = True
            del self.running[completion]
        if self.pending and self.pending[0].sink is sink:
            self.pending.clear()
        self.settle()

    def load(self, version: int) -> None:
        """Use the weights of `version` for all further tokens."""
        self.advance()
        self.versions.append((self.progress, version))
        if self.engine.interrupt == "recompute":
            self._stall(sum(len(one.request.prompt.tokens) + self._tokens(one) for one in self.running))
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
        while self._ends and (self._ends[0][2].ended or self._ends[0][0] <= self.progress + ROUNDING):
            completion = heapq.heappop(self._ends)[2]
            if not completion.ended:
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
        before, self._known = self._known, len(self.running)
        self.engine.settled(self, self._known - before)

    def _stall(self, tokens: int) -> None:
        """Stop decoding while `tokens` tokens are prefilled."""
        self.stalled_until = max(self.stalled_until, self.at) + self.engine.times.prefill(tokens)

    def _tokens(self, completion: TimedCompletion) -> int:
        return min(int(self.progress - completion.begin + ROUNDING), completion.length)

    def _deliver(self, completion: TimedCompletion) -> None:
        request, length = completion.request, completion.length
        completion.ended = True
        del self.running[completion]
        completion.sink.put_nowait(
            Completion(
                prompt_uid=request.prompt.uid,
                sample=request.sample,
                tokens=np.broadcast_to(np.int32(0), length),
                text="",
                sampled_log_prob=np.broadcast_to(np.float32(0), length),
                untruncated_log_prob=np.broadcast_to(np.float32(0), length),
                policy_version=self._version_column(completion),
                finish_reason=completion.reason,
                temperature=request.sampling.temperature,
            )
        )

    def _version_column(self, completion: TimedCompletion) -> Ints:
        """[T] the version of each token: that of the weights at the start of its decode step."""
        newest, version = self.versions[-1]
        if newest <= completion.begin + ROUNDING:
            return np.broadcast_to(np.int32(version), completion.length)
        column, end = np.empty(completion.length, np.int32), completion.length
        for progress, version in reversed(self.versions):
            first = min(end, max(0, math.ceil(progress - completion.begin - ROUNDING)))
            column[first:end] = version
            if (end := first) == 0:
                break
        return column
