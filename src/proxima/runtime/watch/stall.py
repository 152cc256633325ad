"""The stall watch: a stalled run says what it is waiting for."""

import asyncio
import time
from collections.abc import Callable

from proxima.engine.protocol import Health
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.watch.activity import Activity

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
        self.generator, self.on_health, self.late = generator, on_health, late
        self._health: Health | None = None  # the last answer
        self._answered_at = activity.now()
        self._tokens: int | None = None  # sampled, as an engine last said that was ready

    async def run(self) -> None:
        """Watch until cancelled."""
        wait = self.seconds
        while self.seconds:
            await asyncio.sleep(self.seconds / LOOKS)
            await self._ask_engine()
            still = self.activity.now() - self.activity.moved_at
            if still < self.seconds:
                wait = self.seconds
            elif still >= wait:
                self.warn(self._sentence(still))
                wait *= 2

    async def _ask_engine(self) -> None:
        if self.generator is None:
            return
        try:
            health = await asyncio.wait_for(self.generator.engine.health(), min(PATIENCE, self.seconds / LOOKS))
        except Exception:  # whatever it is, it is no answer
            return
        self._health, self._answered_at = health, self.activity.now()
        self.on_health(health)
        if health.tokens is not None:
            if self._tokens not in (None, health.tokens):
                self.activity.moved()
            self._tokens = health.tokens

    def _sentence(self, still: float) -> str:
        from proxima.runtime.watch.standstill import Standstill

        return Standstill(
            activity=self.activity,
            generator=self.generator,
            counts_tokens=self._tokens is not None,
            health=self._health,
            silent=(silent := self.activity.now() - self._answered_at),
            answers=silent <= 2 * self.seconds / LOOKS,
            late=self.late(time.monotonic()) if self.late is not None else None,
        ).sentence(still)
