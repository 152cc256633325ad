"""Time as a dependency: whatever waits or stamps takes a `Clock`, so that tests need not sleep."""

import asyncio
import heapq
import itertools
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

from proxima.data import UserError


class Clock(Protocol):
    """What the runtime knows of time."""

    def now(self) -> float:
        """Seconds, monotonic, from an arbitrary origin: only differences mean something."""
        ...

    def wall(self) -> str:
        """The time of day in UTC as ISO 8601 with milliseconds, `2026-09-02T12:04:31.250+00:00`: to be read, never
        subtracted."""
        ...

    def cpu(self) -> float:
        """CPU seconds of this process, over all its threads, from an arbitrary origin: what the wall clock can't tell
        beside other work."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when `seconds` have gone by; at once if not positive, after giving other tasks a turn."""
        ...


class SystemClock:
    """The machine's own time."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds")

    def cpu(self) -> float:
        return time.process_time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(seconds, 0.0))


class ManualClock:
    """Time that stands still until `advance` moves it.

    Args:
        start: what `wall` says at `now() == 0`, ISO 8601 with offset.
    """

    def __init__(self, start: str = "2026-01-01T00:00:00+00:00") -> None:
        self._start = datetime.fromisoformat(start)
        self._now = 0.0
        self._order = itertools.count()  # equal deadlines wake in the order in which they were asked for
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> str:
        return (self._start + timedelta(seconds=self._now)).isoformat(timespec="milliseconds")

    def cpu(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), woken))
        await woken

    def advance(self, seconds: float) -> None:
        """Move time forward and wake, in order of their deadlines, the sleepers whose time has come.

        The woken tasks run when the event loop gets its next turn; one that sleeps again does so from the new time.
        """
        if seconds < 0:
            raise UserError(f"seconds={seconds!r} must be >= 0; time does not run backwards")
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():  # a cancelled sleeper leaves its future done
                woken.set_result(None)
