"""A completion on its way from a server."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from proxima.engine.http.generation_job import GenerationJob

CancelReason = Literal["interrupted", "aborted"]


@dataclass(eq=False)
class RunningCall:
    """A completion that a server is generating.

    Args:
        name: the id of its request.
        timeout: ends it when no token comes.
        cancel_reason: why it was cancelled before the completion ended; None: it was not.
        answered: a chunk has come.
        timed: the timeout runs; one that has ended can't be moved.
    """

    job: GenerationJob
    name: str
    timeout: asyncio.Timeout
    cancel_reason: CancelReason | None = None
    answered: bool = False
    timed: bool = True
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, cancel_reason: CancelReason) -> None:
        """Close its stream; what came counts."""
        self.cancel_reason = self.cancel_reason or cancel_reason
        self.limit(0.0)

    def limit(self, seconds: float | None) -> None:
        """It ends unless a token comes within this time; None: it may take any."""
        if self.timed and not self.timeout.expired():
            now = asyncio.get_running_loop().time()
            self.timeout.reschedule(None if seconds is None else now + seconds)


async def all_over(calls: Sequence[RunningCall]) -> None:
    """Wait for the end of each."""
    for call in calls:
        await call.over.wait()
