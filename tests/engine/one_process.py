"""The engine in a process of its own, started once for many tests: each gets it with the weights of the start."""

import asyncio
import threading
from dataclasses import dataclass
from typing import ClassVar

from proxima.engine.local_process import LocalProcess, ProcessEngine
from proxima.engine.protocol import EngineSetup, WeightUpdate


class KeptEngine(ProcessEngine):
    """Outlives the one who asked for it."""

    def close(self) -> None:
        """Nothing is ended; `end` does that."""

    def end(self) -> None:
        super().close()


@dataclass(frozen=True, kw_only=True)
class OneProcess(LocalProcess):
    """Builds an engine once, and gives it to all who build it later."""

    kept: ClassVar[list[KeptEngine]] = []

    def build(self, setup: EngineSetup) -> KeptEngine:
        loaded = setup.load_weights()
        if not self.kept:
            self.kept.append(KeptEngine(loaded, self, max_length=setup.max_length))
        engine = self.kept[0]

        async def reset() -> None:
            await engine.publish(WeightUpdate(version=0, module=loaded.model))
            await engine.resume()

        thread = threading.Thread(target=lambda: asyncio.run(reset()))  # an event loop is running in this one
        thread.start()
        thread.join()
        return engine
