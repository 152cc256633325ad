"""New weights for the engine, and what the run hears from it."""

from typing import TYPE_CHECKING

from proxima.data import UserError
from proxima.engine.executor import HookError
from proxima.engine.protocol import Health, WeightUpdate
from proxima.model.compute_thread import Compute
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.watch.activity import Activity
from proxima.runtime.watch.engine_watch import RESUME, EngineWatch, engine_errors
from proxima.runtime.watch.observer import Observer
from proxima.train import TrainStack

if TYPE_CHECKING:
    from proxima.runtime.loop.device_turns import DeviceTurns


class Publisher:
    """Hands the trained weights to the engine.

    During a step, an engine that can't take them ends the run only when the step is in the journal, so that its
    checkpoint fits its weights: `failure` holds the reason until then.

    Args:
        generator: engine and rewards; None where nothing is generated.
        stack: with the trained weights.
        compute: the thread of the tensor work.
        activity, observer: notified of new weights.
        log: name of the engine's log in the run folder.
        shares_devices: engine and trainer take turns: see `DeviceTurns`.
    """

    def __init__(
        self,
        generator: GroupGenerator | None,
        stack: TrainStack,
        compute: Compute,
        activity: Activity,
        observer: Observer,
        log: str,
        *,
        shares_devices: bool = False,
    ) -> None:
        self.generator, self.stack, self.compute = generator, stack, compute
        self.activity, self.observer = activity, observer
        self.watch = EngineWatch(log)
        self.failure: RunEnded | None = None
        self.turns: DeviceTurns | None = None
        if shares_devices and generator is not None and generator.engine.capabilities.sleeps:
            from proxima.runtime.loop import device_turns

            self.turns = device_turns.DeviceTurns(generator.engine, stack, compute)

    async def publish(self, version: int, step: int, *, deferring: bool) -> None:
        """Give the engine the weights `version` of `step`; `deferring` keeps an error until `end_if_failed`.

        Raises:
            UserError: a hook refuses with one; or, not deferring, the engine can't take the weights.
        """
        if self.generator is None:
            return
        engine = self.generator.engine
        try:
            with engine_errors():
                await engine.pause()
                self.generator.newest = version
                whole = await self.compute.run(self.stack.gathered)
                if self.turns is not None:
                    await self.turns.wake()
                await engine.publish(WeightUpdate(version=version, module=whole.model))
                await engine.resume()
        except HookError as error:
            for _, problem in error.failures:
                if isinstance(problem, UserError):
                    raise problem from error
            self._fail(f"after step {step}: {error}; repair or remove the hook and resume (--resume)", error)
        except UserError as error:
            if not deferring:
                raise
            resume = "" if "--resume" in error.remedy else f"; {RESUME}"
            self._fail(f"after step {step}: {error}{resume}", error)
        else:
            self.activity.published(version)
            if figures := await self.watch.published(engine, version):
                self.observer.synced(figures)

    def _fail(self, reason: str, cause: Exception) -> None:
        self.failure = RunEnded(reason)
        self.failure.__cause__ = cause

    def end_if_failed(self) -> None:
        """Raise the failure of the last `publish`."""
        if self.failure is not None:
            raise self.failure

    async def check_health(self, step: int) -> None:
        """Check the engine's health, unless the run ends because of it anyway."""
        if self.generator is not None and self.failure is None:
            self.report_health(await self.generator.engine.health(), step)

    def report_health(self, health: Health, step: int) -> None:
        """Warn about engine processes and servers that died or returned."""
        for text in self.watch.health_warnings(health):
            self.observer.warning(f"step {step}: {text}")
