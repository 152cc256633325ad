"""The stall watch: a stalled run says what it is waiting for."""

import asyncio
from collections.abc import Callable

from proxima.engine.protocol import Health
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.watch.activity import Activity
from proxima.runtime.watch.stall_report import stall_report

LOOKS = 10  # in the time that makes a stall
PATIENCE = 5.0  # seconds that a health check may take


class StallWatch:
    """Warns when there was no token and no finished stage for `seconds`, and again each time that the stall has lasted
    twice as long, until something moves.

    A token counts when the engine's health check reports it; a stage of the loop, a part of an update or an
    evaluation, and a prompt that passes from state to state count at once. It waits in the event loop, which is free
    while the compute thread works.

    Args:
        seconds: the length of a stall; 0: `run` ends at once.
        generator: engine and rewards; None: there are none.
        on_health: gets each answer of the engine to a health check.
        late: seconds and a sentence about the rank that the others wait for, at a moment of the monotonic clock; None:
            there is none.
    """

    def __init__(
        self, seconds: float, activity: Activity, warn: Callable[[str], None], generator: GroupGenerator | None,
        on_health: Callable[[Health], None], late: Callable[[float], tuple[float, str] | None] | None = None,
    ) -> None:  # fmt: skip
        self.seconds, self.activity, self.warn = seconds, activity, warn
        self.interval = seconds / LOOKS
        self.generator, self.on_health, self.late = generator, on_health, late
        self.health: Health | None = None  # the last answer
        self.answered_at = activity.now()
        self.tokens: int | None = None  # sampled, as an engine last said that was ready

    async def run(self) -> None:
        """Watch until cancelled."""
        wait = self.seconds
        while self.seconds:
            await asyncio.sleep(self.interval)
            await self._ask_engine()
            still = self.activity.now() - self.activity.moved_at
            if still < self.seconds:
                wait = self.seconds
            elif still >= wait:
                self.warn(stall_report(self, still))
                wait *= 2

    async def _ask_engine(self) -> None:
        if self.generator is None:
            return
        try:
            health = await asyncio.wait_for(self.generator.engine.health(), min(PATIENCE, self.interval))
        except Exception:  # whatever it is, it is no answer
            return
        self.health, self.answered_at = health, self.activity.now()
        self.on_health(health)
        if health.tokens is not None:
            if self.tokens not in (None, health.tokens):
                self.activity.moved()
            self.tokens = health.tokens
