"""The time of day as it was when this process began, counted on by a clock that nobody sets: what a client was promised
for an hour lasts an hour, and no checkpoint is deleted early, when the machine's clock jumps."""

import time
from datetime import UTC, datetime


def _elapsed() -> float:
    """Seconds from an arbitrary origin; on Linux with those that the machine slept."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    if boot is None:
        return time.monotonic()
    return time.clock_gettime(boot)


_BEGAN = time.time() - _elapsed()


def now() -> float:
    """Seconds since 1970."""
    return _BEGAN + _elapsed()


def date(later: float = 0.0) -> str:
    """The time after so many seconds, as the SDK reads it; a later one is greater as a text, too."""
    return datetime.fromtimestamp(now() + later, UTC).isoformat(timespec="microseconds")
