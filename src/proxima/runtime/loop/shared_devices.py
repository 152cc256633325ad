"""Turns of engine and trainer on the same devices: the engine sleeps from a full batch until its new weights."""

from typing import cast

from proxima.engine.executor import Executor, HookError
from proxima.engine.protocol import Engine, SleepingEngine
from proxima.model.compute_thread import ComputeThread
from proxima.runtime.loop.publisher import DeviceTurns
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.watch.engine_watch import engine_errors
from proxima.training.stack import TrainStack


class SharedDevices(DeviceTurns):
    """Turns on a device that trainer and engine share. The engine has the first.

    Args:
        engine: one whose capabilities say that it sleeps.
        stack: with the trained weights.
        compute: the thread of the tensor work.
    """

    def __init__(self, engine: Engine, stack: TrainStack, compute: ComputeThread) -> None:
        self.engine, self.stack, self.compute = engine, stack, compute
        self.sleeper = cast(SleepingEngine, engine.engine if isinstance(engine, Executor) else engine)
        self.asleep = False

    async def release_devices(self) -> None:
        try:
            with engine_errors():
                await self.engine.pause()
                await self.sleeper.sleep()
        except HookError as error:
            raise RunEnded(f"before an update: {error}; repair or remove the hook and resume (--resume)") from error
        self.asleep = True

    async def wake(self) -> None:
        if self.asleep:
            await self.compute.run(self.stack.release)
            await self.sleeper.wake()
            self.asleep = False

    async def resume(self) -> None:
        if self.asleep:
            with engine_errors():
                await self.wake()
                await self.engine.resume()
