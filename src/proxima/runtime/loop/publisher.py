"""New weights for the engine, and what the run hears from it."""

from proxima.data import UserError
from proxima.engine.executor import HookError
from proxima.engine.protocol import Health, WeightUpdate
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.loop.services import RunServices
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.watch.engine_watch import RESUME, EngineWatch, engine_errors
from proxima.training.learner import Learner


class DeviceTurns:
    """Turns of engine and trainer on the devices: nobody waits, each has its own. `SharedDevices` is the other case."""

    async def release_devices(self) -> None:
        """Pause the engine and leave the devices to the trainer.

        Raises:
            RunEnded: a hook of the pause failed.
        """

    async def wake(self) -> None:
        """Release the trainer's memory and give the devices back to the engine, which stays paused."""

    async def resume(self) -> None:
        """Let the engine continue with its current weights."""


class Publisher:
    """Hands the trained weights to the engine.

    During a step, an engine that can't take them ends the run only when the step is in the journal, so that its
    checkpoint fits its weights: `failure` holds the reason until then.

    Args:
        generator: engine and rewards; None where nothing is generated.
        learner: with the trained weights.
        services: its store and its observer are notified of new weights.
        turns: of engine and trainer on the devices.
    """

    def __init__(
        self, generator: GroupGenerator | None, learner: Learner, services: RunServices, turns: DeviceTurns
    ) -> None:
        self.generator, self.learner, self.turns = generator, learner, turns
        self.activity, self.observer = services.store.activity, services.observer
        self.watch = EngineWatch(services.store.folder.engine_log.name)
        self.failure: RunEnded | None = None

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
                whole = await self.learner.compute.run(self.learner.stack.gathered)
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
