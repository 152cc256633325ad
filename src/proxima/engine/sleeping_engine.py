"""An engine that shares its devices by taking turns."""

from typing import Protocol

from proxima.engine.protocol import Engine


class SleepingEngine(Engine, Protocol):
    """An engine that can release the memory of its devices. Both calls require a paused engine, which stays paused."""

    async def sleep(self) -> None:
        """Release the memory; nothing is sampled, scored or published before `wake`."""
        ...

    async def wake(self) -> None:
        """Take the memory again, with the same weights."""
        ...
