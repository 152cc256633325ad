"""A replica that takes the time of continuous batching and computes nothing."""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.data import Completion, FinishReason
from proxima.data.columns import Ints
from proxima.data.random import mix
from proxima.engine.protocol import InFlight, Interrupt, Request
from proxima.engine.scheduler import worth_admitting
from proxima.lab.simulate.times import Times

ROUNDING = 1e-6  # tokens: sums of floating-point times are not exact


@dataclass(eq=False)
class TimedCompletion:
    """A waiting or running completion. `begin` is the progress of the engine when it was admitted."""

    request: Request
    sink: "asyncio.Queue[Completion]"
    length: int
    reason: FinishReason
    begin: float = 0.0
    ended: bool = False


@dataclass(eq=False)
class TimedPrompt:
    """The completions of a prompt that have not started yet."""

    tokens: int
    completions: deque[TimedCompletion]
    filled: bool = False  # True if its KV is computed


class TimedReplica:
    """A replica of a `TimedEngine`. All running completions advance together: `progress` counts the tokens of a
    completion running since the start, so a completion ends at the progress of its admission plus its length. `slots`
    completions run at once; `interrupt` is that of `Local`, and `seed` is for the lengths.
    """

    def __init__(self, times: Times, *, slots: int, interrupt: Interrupt, seed: int, now: Callable[[], float]) -> None:
        self.times, self.slots, self.interrupt, self.seed, self.now = times, slots, interrupt, seed, now
        self.waiting: deque[TimedPrompt] = deque()
        self.running: dict[TimedCompletion, None] = {}
        self.held = 0  # completions that run or wait here
        self.taken: Callable[[], TimedPrompt | None] = lambda: None  # takes a prompt that waits at another replica
        self.settled: Callable[[TimedReplica, float, int], None] = lambda replica, at, more: None  # `more` now running
        self._ends: list[tuple[float, int, TimedCompletion]] = []  # a heap, by progress
        self._numbers = count()
        self._progress, self._at, self._stalled_until = 0.0, now(), 0.0
        self._paused = self._drains = False
        self._holds = self._known = 0
        self._versions: list[tuple[float, int]] = [(0.0, 0)]  # progress, and the version of the tokens from then on
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()

    # ---- requests of the engine --------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request], sink: "asyncio.Queue[Completion]") -> None:
        """Run the requests when there is room; `held` includes them already. Completions go to `sink` as they end."""
        groups: dict[int, TimedPrompt] = {}
        for request in requests:
            prompt = request.prompt
            entry = groups.setdefault(prompt.uid, TimedPrompt(len(prompt.tokens), deque(), filled=request.turn > 0))
            entry.completions.append(self._completion(request, sink))
        self.waiting.extend(groups.values())
        self.settle()

    def discard(self, sink: "asyncio.Queue[Completion]") -> None:
        """Drop the completions of a caller that no longer waits for them."""
        self._advance()
        for completion in [running for running in self.running if running.sink is sink]:
            completion.ended = True
            del self.running[completion]
        self.waiting = deque(entry for entry in self.waiting if entry.completions[0].sink is not sink)
        self.held = len(self.running) + sum(len(entry.completions) for entry in self.waiting)
        self.settle()

    def in_flight(self) -> list[InFlight]:
        """Return the running completions that have tokens."""
        self._advance()
        return [
            InFlight(
                prompt_uid=running.request.prompt.uid,
                sample=running.request.sample,
                turn=running.request.turn,
                prompt_tokens=running.request.prompt.tokens,
                tokens=constant_column(0, np.int32, tokens),
                policy_version=self._version_column(running)[:tokens],
                temperature=running.request.sampling.temperature,
            )
            for running in self.running
            if (tokens := self._tokens(running))
        ]

    def drain(self) -> None:
        """Finish the running completions, even during a pause."""
        self._drains = True
        self.settle()

    async def drained(self) -> None:
        """Wait until no completion is running."""
        while self.running:
            self._empty.clear()
            await self._empty.wait()
        self._drains = False

    def load(self, version: int) -> None:
        """Use the weights of `version` for all further tokens."""
        self._advance()
        self._versions.append((self._progress, version))
        if self.interrupt == "recompute":
            self.stall(sum(len(running.request.prompt.tokens) + self._tokens(running) for running in self.running))
        for entry in self.waiting:
            entry.filled = False
        self.settle()

    def pause(self, *, paused: bool) -> None:
        """Pause or resume sampling."""
        self._advance()
        self._paused = paused
        self.settle()

    def abort(self, prompt_uid: int) -> None:
        """End the completions of a prompt at their current length."""
        self._advance()
        for completion in [running for running in self.running if running.request.prompt.uid == prompt_uid]:
            completion.length, completion.reason = self._tokens(completion), "abort"
            self._deliver(completion)
        for entry in list(self.waiting):
            if entry.completions[0].request.prompt.uid == prompt_uid:
                self.waiting.remove(entry)
                for completion in entry.completions:
                    completion.length, completion.reason = 0, "abort"
                    self._deliver(completion)
        self.settle()

    # ---- sharing the trainer's thread --------------------------------------------------------------------------------

    def hold(self) -> None:
        """Stop decoding: the trainer needs the thread that this engine decodes in."""
        self._advance()
        self._holds += 1
        self.settle()

    def release(self) -> None:
        self._advance()
        self._holds -= 1
        self.settle()

    # ---- time --------------------------------------------------------------------------------------------------------

    @property
    def _decodes(self) -> bool:
        return bool(self.running) and not self._holds and (self._drains or not self._paused)

    def _advance(self) -> None:
        """Add the tokens sampled since the last call to the running completions."""
        now = self.now()
        if self._decodes:
            seconds = max(0.0, now - max(self._at, self._stalled_until))
            self._progress += seconds / self.times.decode_step(len(self.running))
        self._at = now

    def settle(self) -> None:
        """Deliver ended completions, admit waiting ones, and set a timer for the next end."""
        self._advance()
        while self._ends and (self._ends[0][2].ended or self._ends[0][0] <= self._progress + ROUNDING):
            completion = heapq.heappop(self._ends)[2]
            if not completion.ended:
                self._deliver(completion)
        if not self._paused and not self._holds:
            self._admit()
        if not self.running:
            self._empty.set()
        before, self._known = self._known, len(self.running)
        self.settled(self, self._at, self._known - before)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._decodes:
            left = (self._ends[0][0] - self._progress) * self.times.decode_step(len(self.running))
            delay = max(0.0, self._stalled_until - self._at) + max(0.0, left)
            self._timer = asyncio.get_running_loop().call_later(delay, self.settle)

    def stall(self, tokens: int) -> float:
        """Stop decoding while `tokens` tokens are prefilled, and return the instant at which that ends."""
        self._advance()
        self._stalled_until = max(self._stalled_until, self._at) + tokens * self.times.prefill_token
        return self._stalled_until

    def _admit(self) -> None:
        free = self.slots - len(self.running)
        if not worth_admitting(free, self.slots):
            return
        if not self.waiting and (entry := self.taken()) is not None:
            self.waiting.append(entry)
            self.held += len(entry.completions)
        fed = 0
        while self.waiting and free:
            entry = self.waiting[0]
            if not entry.filled:
                fed += entry.tokens
                entry.filled = True
            while entry.completions and free:
                completion = entry.completions.popleft()
                completion.begin = self._progress
                self.running[completion] = None
                heapq.heappush(self._ends, (self._progress + completion.length, next(self._numbers), completion))
                free -= 1
            if not entry.completions:
                self.waiting.popleft()
        self.stall(fed)

    # ---- completions -------------------------------------------------------------------------------------------------

    def _completion(self, request: Request, sink: "asyncio.Queue[Completion]") -> TimedCompletion:
        most = request.sampling.max_tokens
        seed = mix(self.seed, request.turn) if request.turn else self.seed
        wanted = round(self.times.lengths(most).draw(seed, request.prompt.uid, request.sample))
        reason: FinishReason = "length" if wanted > most else "stop"
        return TimedCompletion(request, sink, max(1, min(wanted, most)), reason)

    def _tokens(self, completion: TimedCompletion) -> int:
        """Return the number of tokens that a running completion has."""
        return min(int(self._progress - completion.begin + ROUNDING), completion.length)

    def _deliver(self, completion: TimedCompletion) -> None:
        request, length = completion.request, completion.length
        completion.ended = True
        self.held -= 1
        self.running.pop(completion, None)
        completion.sink.put_nowait(
            Completion(
                prompt_uid=request.prompt.uid,
                sample=request.sample,
                turn=request.turn,
                tokens=constant_column(0, np.int32, length),
                text="",
                sampled_log_prob=constant_column(0, np.float32, length),
                untruncated_log_prob=constant_column(0, np.float32, length),
                policy_version=self._version_column(completion),
                finish_reason=completion.reason,
                temperature=request.sampling.temperature,
            )
        )

    def _version_column(self, completion: TimedCompletion) -> Ints:
        """[T] the version of each token: that of the weights at the start of its decode step."""
        newest, version = self._versions[-1]
        if newest <= completion.begin + ROUNDING:
            return constant_column(version, np.int32, completion.length)
        column, end = np.empty(completion.length, np.int32), completion.length
        for progress, version in reversed(self._versions):
            first = min(end, max(0, math.ceil(progress - completion.begin - ROUNDING)))
            column[first:end] = version
            if (end := first) == 0:
                break
        return column


def constant_column(value: int, dtype: Any, length: int) -> NDArray[Any]:
    """[length] read-only column of one value; columns of the same value and dtype share memory."""
    size = 1 << max(10, (length - 1).bit_length())
    return _longest(value, dtype, size)[:length]


@lru_cache(maxsize=64)
def _longest(value: int, dtype: Any, size: int) -> NDArray[Any]:
    column = np.full(size, value, dtype)
    column.flags.writeable = False
    return column
