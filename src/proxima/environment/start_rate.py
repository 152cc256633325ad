"""Programs, containers and environments of episodes start one after another, at a bounded rate."""

import asyncio
import math
from collections.abc import Callable
from time import monotonic

from proxima.system.machine import usable_cores

EACH_CORE = 4.0  # starts a second, where the recipe gives no number: an engine needs a quarter of a second for each


class StartRate:
    """As many as start in a second may start at once; each further one waits its turn.

    Args:
        per_second: starts a second; None: `EACH_CORE` for each core.
        now: a clock, in seconds.
    """

    def __init__(self, per_second: float | None = None, now: Callable[[], float] = monotonic) -> None:
        if per_second is None:
            rate = EACH_CORE * max(1, usable_cores())
        else:
            rate = per_second
        self._interval = 1 / rate
        self._at_once = max(0.0, math.floor(rate) - 1) * self._interval
        self._now = now
        self._next = -math.inf  # when the next one would start if all were evenly spaced

    def reserve(self) -> float:
        """Return the seconds after which the next one may start, which then has had its turn."""
        now = self._now()
        turn = max(self._next, now)
        self._next = turn + self._interval
        return max(0.0, turn - self._at_once - now)

    async def turn(self) -> None:
        """Wait for a turn."""
        seconds = self.reserve()
        if seconds > 0:
            await asyncio.sleep(seconds)
