"""Time as a dependency: whatever measures or stamps takes a `Clock`, so that tests need not wait."""

import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path


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
        nanoseconds = 0
        for thread in Path("/proc/self/task").glob("*/schedstat"):
            with suppress(OSError, IndexError, ValueError):  # the thread has ended
                nanoseconds += int(thread.read_text().split()[1])
        return nanoseconds / 1e9
