"""One or several engines that take the time of continuous batching and compute nothing, behind one `Engine`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from proxima.data import Completion
from proxima.data.columns import Floats
from proxima.engine.protocol import (
    Capabilities,
    Health,
    InFlight,
    Interrupt,
    PauseMode,
    Request,
    ScoreRequest,
    WeightUpdate,
)
from proxima.lab.simulate.timed_replica import TimedPrompt, TimedReplica
from proxima.lab.simulate.times import Times

HELD = attrgetter("held")


@dataclass(frozen=True)
class Fleet:
    """Engines on dedicated devices: their number, and the completions that each runs at once."""

    replicas: int
    slots: int


class TimedEngine:
    """See `Engine`. Prompts are routed to replicas as to servers (`engine.http.router`): the least loaded replica gets
    a prompt with all its completions, and one with room and nothing waiting takes a prompt that waits elsewhere. All
    replicas receive new weights at once.

    Args:
        fleet: the number of replicas, and their slots.
        interrupt: see `Local`. seed: of the lengths.
    """

    capabilities = Capabilities(weight_updates=frozenset({"module"}), pause_modes=frozenset({"keep"}), score=True)

    def __init__(
        self, times: Times, fleet: Fleet, *, interrupt: Interrupt, seed: int, now: Callable[[], float]
    ) -> None:
        self.times, self.interrupt, self.now = times, interrupt, now
        self.version = 0
        self.trace: list[tuple[float, int]] = []  # instants, and the number of completions that run from then on
        self.published: list[tuple[float, float]] = []  # start and end of each publication
        self._queues: dict[TimedReplica, None] = {}  # replicas at which prompts wait
        self.replicas = [
            TimedReplica(times, slots=fleet.slots, interrupt=interrupt, seed=seed, now=now)
            for _ in range(fleet.replicas)
        ]
        for replica in self.replicas:
            replica.settled, replica.taken = self._settled, self._waiting_prompt

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        done: asyncio.Queue[Completion] = asyncio.Queue()
        of_prompt: dict[int, list[Request]] = {}
        for request in requests:
            of_prompt.setdefault(request.prompt.uid, []).append(request)
        shares: dict[TimedReplica, list[Request]] = {}
        for of_one in of_prompt.values():
            home = min(self.replicas, key=HELD)
            home.held += len(of_one)
            shares.setdefault(home, []).extend(of_one)
        for replica, share in shares.items():
            replica.submit(share, done)
        remaining = len(requests)
        try:
            while remaining:
                completion = await done.get()
                remaining -= 1
                yield completion
        finally:
            if remaining:
                for replica in self.replicas:
                    replica.discard(done)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Floats]:
        shares = [requests[i :: len(self.replicas)] for i in range(len(self.replicas))]
        tokens = [sum(len(asked.prompt_tokens) + len(asked.tokens) for asked in share) for share in shares]
        ends = [replica.stall(n) for replica, n in zip(self.replicas, tokens, strict=True)]
        await asyncio.sleep(max(0.0, max(ends) - self.now()))
        return [np.zeros(len(request.tokens), np.float32) for request in requests]

    async def in_flight(self) -> list[InFlight]:
        return [running for replica in self.replicas for running in replica.in_flight()]

    async def publish(self, update: WeightUpdate) -> None:
        begin = self.now()
        if self.interrupt == "finish":
            for replica in self.replicas:
                replica.drain()
            for replica in self.replicas:
                await replica.drained()
        await asyncio.sleep(self.times.publish)
        self.version = update.version
        self.published.append((begin, self.now()))
        for replica in self.replicas:
            replica.load(update.version)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await asyncio.sleep(self.times.pause)
        for replica in self.replicas:
            replica.pause(paused=True)

    async def resume(self) -> None:
        for replica in self.replicas:
            replica.pause(paused=False)

    async def abort(self, prompt_uid: int) -> None:
        for replica in self.replicas:
            replica.abort(prompt_uid)

    async def health(self) -> Health:
        running = sum(len(replica.running) for replica in self.replicas)
        waiting = sum(len(entry.completions) for replica in self.replicas for entry in replica.waiting)
        return Health(ok=True, version=self.version, running=running, waiting=waiting)

    # ---- sharing the trainer's thread --------------------------------------------------------------------------------

    def hold(self) -> None:
        """Stop decoding: the trainer needs the thread that this engine decodes in."""
        for replica in self.replicas:
            replica.hold()

    def release(self) -> None:
        for replica in self.replicas:
            replica.release()

    # ---- callbacks of the replicas -----------------------------------------------------------------------------------

    def _settled(self, replica: TimedReplica, at: float, more: int) -> None:
        if more or not self.trace:
            self.trace.append((at, (self.trace[-1][1] if self.trace else 0) + more))
        if replica.waiting:
            self._queues[replica] = None
        else:
            self._queues.pop(replica, None)

    def _waiting_prompt(self) -> TimedPrompt | None:
        """Take the next prompt of the longest queue; the replica that gets it does not have its KV."""
        if not self._queues:
            return None
        longest = max(self._queues, key=lambda replica: len(replica.waiting))
        entry = longest.waiting.popleft()
        longest.held -= len(entry.completions)
        entry.filled = False
        if not longest.waiting:
            del self._queues[longest]
        return entry
