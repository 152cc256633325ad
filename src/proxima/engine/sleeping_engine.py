"""An engine on devices that others use by turns."""

from typing import Protocol

from proxima.engine.protocol import Engine


class SleepingEngine(Engine, Protocol):
    """An engine that can give up the memory of its devices. Both calls are for a paused one, which stays paused."""

    async def sleep(self) -> None:
        """Release the memory; nothing is sampled, scored or published before `wake`."""
        ...

    async def wake(self) -> None:
        """Reallocate the memory, with the same weights."""
        ...
