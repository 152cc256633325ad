"""The clock of an attempt at an episode: what waits for us does not count towards its limit."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Literal, TypeVar, get_args

from proxima.environment.start_rate import StartRate

T = TypeVar("T")
TICK = 0.1  # seconds between two beats of an event loop
Account = Literal["queued", "own", "policy"]


class LoopTime:
    """The time of the running event loop, in seconds, without what held it up, such as the start of a large process:
    what came meanwhile could not be read. Runs until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._held_up = 0.0
        self._beat_at = self._loop.time()
        self._next = self._loop.call_later(TICK, self._beat)

    def __call__(self) -> float:
        now = self._loop.time()
        return now - self._held_up - self._overdue(now)

    def stop(self) -> None:
        """End it."""
        self._next.cancel()

    def _beat(self) -> None:
        now = self._loop.time()
        self._held_up += self._overdue(now)
        self._beat_at = now
        self._next = self._loop.call_later(TICK, self._beat)

    def _overdue(self, now: float) -> float:
        return max(0.0, now - self._beat_at - TICK)


class EpisodeClock:
    """Where the time of an attempt goes: it is `queued` for a place to play, waits for the `policy`, or else is its
    `own`. Only its own time is limited.

        queued ──▶ own ──▶ policy ──▶ own ──▶ …        several requests that wait at once count once

    Args:
        limit: seconds of its own time.
        now: a clock, in seconds.
        starts: the rate at which episodes that have a place begin; None: at once.

    Attributes: `queues`, begin and end of each wait for a place, on the event loop's clock.
    """

    def __init__(
        self, limit: float = math.inf, now: Callable[[], float] = time.monotonic, starts: StartRate | None = None
    ) -> None:
        self.limit = limit
        self._starts = starts
        self._now = now
        self._since = now()
        self._spent: dict[str, float] = dict.fromkeys(get_args(Account), 0.0)
        self._waits = {"queued": 0, "policy": 0}  # how many are in progress
        self.queues: list[tuple[float, float]] = []
        self._limited: asyncio.Timeout | None = None
        self._alarm: asyncio.TimerHandle | None = None

    def seconds(self) -> dict[str, float]:
        """The time so far, by account."""
        return self._spent | {self._account: self._spent[self._account] + self._now() - self._since}

    @contextmanager
    def queued(self) -> Iterator[None]:
        """A wait for a place, in the block."""
        loop_time = asyncio.get_running_loop().time
        begin = loop_time()
        try:
            with self._waiting("queued"):
                yield
        finally:
            self.queues.append((begin, loop_time()))

    def worked(self, seconds: float) -> None:
        """Count so many seconds of the wait that has just ended as its own time: a worker's queue tells only then."""
        self._spent["queued"] -= seconds
        self._spent["own"] += seconds

    @asynccontextmanager
    async def place_in(self, places: asyncio.Semaphore) -> AsyncIterator[None]:
        """One of the places, for which it may have to wait, in the block, and then for its turn to start."""
        async with AsyncExitStack() as place:
            with self.queued():
                await place.enter_async_context(places)
                if self._starts is not None:
                    await self._starts.turn()
            yield

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A wait for the policy, in the block."""
        with self._waiting("policy"):
            yield

    async def within(self, work: Awaitable[T]) -> T:
        """Await work within the limit.

        Raises:
            TimeoutError: the limit has passed, and the work was cancelled; `late` is then true.
        """
        try:
            async with asyncio.timeout(None) as self._limited:
                self._set_alarm()
                return await work
        finally:
            self._stop_alarm()

    @property
    def late(self) -> bool:
        """True if its own time is up, also while the work is still being cancelled."""
        return self._limited is not None and self._limited.expired()

    @property
    def _account(self) -> Account:
        if self._waits["queued"]:
            return "queued"
        return "policy" if self._waits["policy"] else "own"

    @contextmanager
    def _waiting(self, account: Account) -> Iterator[None]:
        self._change(account, 1)
        try:
            yield
        finally:
            self._change(account, -1)

    def _change(self, account: Account, more: int) -> None:
        self._spent = self.seconds()
        self._since = self._now()
        self._waits[account] += more
        self._set_alarm()

    def _set_alarm(self) -> None:
        """End the work once the rest of its own time is over, which its waits put off."""
        self._stop_alarm()
        if self._limited is None or self.limit == math.inf or self._account != "own":
            return
        left = self.limit - self.seconds()["own"]
        if left > 0:
            self._alarm = asyncio.get_running_loop().call_later(left, self._set_alarm)
        else:
            with suppress(RuntimeError):  # the work is over
                self._limited.reschedule(0.0)

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
