"""Time as a dependency: whatever measures or stamps takes a `Clock`, so that tests need not wait.

`VirtualClock` is simulated time that passes only when something waits for it: hours of sleep take a moment, in a fixed
order.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from proxima.system.linux import core_wait

T = TypeVar("T")


class Clock:
    """The time sources of the runtime: the machine's own time."""

    def now(self) -> float:
        """Seconds, monotonic, from an arbitrary origin: only differences have a meaning."""
        return time.monotonic()

    def wall(self) -> str:
        """The time of day in UTC, ISO 8601 with milliseconds, `2026-09-02T12:04:31.250+00:00`: for people to read."""
        return datetime.now(UTC).isoformat(timespec="milliseconds")

    def stamp(self) -> str:
        """The time of day in the name of a folder, `20260902-120431`."""
        return self.wall()[:19].replace("-", "").replace(":", "").replace("T", "-")

    def cpu(self) -> float:
        """CPU seconds of this process, over all its threads, from an arbitrary origin."""
        return time.process_time()

    def core_wait(self) -> float:
        """Seconds that the present threads of this process could have run and waited for a core, from an arbitrary
        origin; 0 where the kernel does not count them (anywhere but on Linux)."""
        return core_wait()


class VirtualClock(Clock):
    """Virtual seconds, and dates from the beginning of 2026 on."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> str:
        return (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)).isoformat(timespec="milliseconds")

    def cpu(self) -> float:
        return self.seconds

    def core_wait(self) -> float:
        return 0.0


def run_virtually(coroutine: Coroutine[Any, Any, T], clock: VirtualClock) -> T:
    """Run a coroutine on the time of `clock`, and return its result.

    Raises:
        Deadlock: the coroutine can never end.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        return runner.run(coroutine)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which `asyncio.sleep` and timeouts take no time. Threads and processes must not be awaited:
    nothing waits for them."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_Skip(clock))
        self._virtual = clock

    def time(self) -> float:
        return self._virtual.seconds


class _Skip(selectors.DefaultSelector):
    """Never waits: advances the clock to the next wake-up of the event loop."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise Deadlock("every task waits for another one")
        self._clock.seconds += max(0.0, timeout)
        return []


class Deadlock(RuntimeError):
    """All tasks wait, and nothing is scheduled that could wake one up."""
