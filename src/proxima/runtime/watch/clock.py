"""Time as a dependency: whatever measures or stamps takes a `Clock`, so that tests need not wait."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """The time sources of the runtime."""

    def now(self) -> float:
        """Seconds, monotonic, from an arbitrary origin: only differences have a meaning."""

    def wall(self) -> str:
        """The time of day in UTC, ISO 8601 with milliseconds, `2026-09-02T12:04:31.250+00:00`: for people to read."""

    def cpu(self) -> float:
        """CPU seconds of this process, over all its threads, from an arbitrary origin."""


class SystemClock:
    """The machine's own time."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds")

    def cpu(self) -> float:
        return time.process_time()
