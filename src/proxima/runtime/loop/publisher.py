"""Publishes weights to the engine, takes turns with it on shared devices, and reports what it measures."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from proxima.data import UserError
from proxima.engine.executor import Executor, HookError
from proxima.engine.protocol import Engine, Health, ServerError, SleepingEngine, StagingEngine, WeightUpdate
from proxima.model.compute_thread import ComputeThread
from proxima.model.pretrained import LoadedModel
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.loop.training_loop import RunEnded, RunServices
from proxima.training.learner import Learner
from proxima.training.stack import TrainStack

RESUME = "repair the engine and resume (--resume)"


class DeviceTurns:
    """Turns of engine and trainer on the devices. In this class they have separate devices, so every method is a no-op;
    `SharedDevices` alternates."""

    shared = False

    async def release_devices(self) -> None:
        """Pause the engine and leave the devices to the trainer.

        Raises:
            RunEnded: a hook of the pause failed.
        """

    async def wake(self) -> None:
        """Release the trainer's memory and return the devices to the engine, which stays paused."""

    async def resume(self) -> None:
        """Let the engine continue with its current weights."""


class Publisher:
    """Publishes the trained weights to the engine.

    If the engine can't take them during a step, the run ends only after the step is in the journal, so that the
    checkpoint matches the weights; `failure` holds the reason until then.

    Args:
        generator: engine and rewards; None if nothing is generated.
        learner: holds the trained weights.
        services: its store and its observer are notified of new weights.
        turns: of engine and trainer on the devices.
    """

    def __init__(
        self, generator: GroupGenerator | None, learner: Learner, services: RunServices, turns: DeviceTurns
    ) -> None:
        self.generator = generator
        self.learner = learner
        self.turns = turns
        self.activity = services.store.activity
        self.observer = services.observer
        self.reports = EngineReports(services.store.folder.engine_log.name)
        self.failure: RunEnded | None = None

    async def publish(self, version: int, step: int, *, deferring: bool) -> None:
        """Give the engine the weights `version` of `step`. An error of a hook, and with `deferring` one of the engine,
        is kept for `end_if_failed`.

        Raises:
            UserError: a hook raised one; or the engine can't take the weights and `deferring` is False.
        """
        if self.generator is None:
            return
        engine = self.generator.engine
        try:
            with engine_errors():
                await self._send(engine, version)
        except HookError as error:
            for _, problem in error.failures:
                if isinstance(problem, UserError):
                    raise problem from error
            self._fail(f"after step {step}: {error}; repair or remove the hook and resume (--resume)", error)
        except UserError as error:
            if not deferring:
                raise
            reason = f"after step {step}: {error}"
            if "--resume" not in error.remedy:
                reason = f"{reason}; {RESUME}"
            self._fail(reason, error)
        else:
            self.activity.published(version)
            figures = await self.reports.published(engine, version)
            if figures:
                self.observer.synced(figures)

    async def _send(self, engine: Engine, version: int) -> None:
        """Pause the engine and send it the weights. An engine that can stage weights, on its own devices, keeps
        sampling during the transfer."""
        stages = engine.capabilities.stages and not self.turns.shared
        if not stages:
            await engine.pause()
        weights = await self.learner.compute.run(self._weights)
        stack = self.learner.stack
        changes = stack.changes
        update = WeightUpdate(version=version, module=weights.model, holds=lambda: stack.changes == changes)
        if stages:
            await cast(StagingEngine, engine).stage(update)
            await engine.pause()
        await self.turns.wake()
        await engine.publish(update)
        await engine.resume()

    def _weights(self) -> LoadedModel:
        """The weights in the form that the engine reads."""
        assert self.generator is not None
        stack = self.learner.stack
        if self.generator.engine.capabilities.reads_lent:
            return stack.lent_model()
        return stack.gathered()

    def _fail(self, reason: str, cause: Exception) -> None:
        self.failure = RunEnded(reason)
        self.failure.__cause__ = cause

    def end_if_failed(self) -> None:
        """Raise the failure that `publish` kept, if any."""
        if self.failure is not None:
            raise self.failure

    async def check_health(self, step: int) -> None:
        """Check the engine's health, unless the run is about to end because of the engine."""
        if self.generator is not None and self.failure is None:
            self.report_health(await self.generator.engine.health(), step)

    def report_health(self, health: Health, step: int) -> None:
        """Warn about engine processes and servers that died or returned."""
        for text in self.reports.health_warnings(health):
            self.observer.warning(f"step {step}: {text}")


class SharedDevices(DeviceTurns):
    """Turns on devices that trainer and engine share: the engine starts, and sleeps from a full batch until its new
    weights.

    Args:
        engine: one that can sleep, by its capabilities.
        stack: with the trained weights.
        compute: the thread of the tensor work.
    """

    shared = True

    def __init__(self, engine: Engine, stack: TrainStack, compute: ComputeThread) -> None:
        self.engine = engine
        self.stack = stack
        self.compute = compute
        sleeper = engine.engine if isinstance(engine, Executor) else engine
        self.sleeper = cast(SleepingEngine, sleeper)
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


class EngineReports:
    """Collects what an engine reports during a run: weight syncs, and servers that join or fail.

    Reads `Health.detail`: `sync` (figures of the last publish), `replicas` (counts since the start), `events` (warnings
    for the user since the start), `notes` (other lines), `log` (where to look, instead of the engine's log in the run
    folder, the argument `log`), `exits` (how often the process has exited) and `exit_reason` (of the last exit).
    `metrics` are those of the current step, whose start clears them.
    """

    def __init__(self, log: str) -> None:
        self.log = log
        self.metrics: dict[str, float] = {}
        self._exits = 0
        self._seen = 0  # events
        self._noted = 0  # notes
        self._counts: dict[str, float] = {}

    async def published(self, engine: Engine, version: int) -> dict[str, Any]:
        """The engine's measurements of a weight sync: numbers under `sync/`, `version`, and the `notes` since the last
        sync; empty for an engine that measures nothing."""
        detail = (await engine.health()).detail
        sync = detail.get("sync") or {}
        if not sync:
            return {}
        self.metrics |= {f"sync/{name}": value for name, value in _numbers(sync).items()}
        notes = list(detail.get("notes") or ())
        new = notes[self._noted :]
        self._noted = len(notes)
        return {"version": version, "notes": new, **self.metrics}

    def health_warnings(self, health: Health) -> list[str]:
        """Warnings about events since the last call, even those that cost only time."""
        detail = health.detail
        warnings = self._exit_warnings(detail)
        events = detail.get("events") or ()
        warnings += map(str, events[self._seen :])
        self._seen = max(self._seen, len(events))
        lost = self._count(detail.get("replicas") or {}).get("lost", 0)
        if lost > 0:
            text = "1 server response was" if lost == 1 else f"{lost:g} server responses were"
            place = detail.get("log") or self.log
            warnings.append(f"{text} unusable, and requested again; see {place}")
        return warnings

    def _exit_warnings(self, detail: Mapping[str, Any]) -> list[str]:
        exits = int(detail.get("exits", 0))
        more = exits - self._exits
        if more <= 0:
            return []
        self._exits = exits
        times = "once" if more == 1 else f"{more} times"
        ended = f"the engine's process ended {times} and was replaced"
        if detail.get("exit_reason"):
            ended = f"{ended} ({detail['exit_reason']})"
        return [f"{ended}; what it had not finished is generated again. See {self.log}"]

    def _count(self, replicas: Mapping[str, Any]) -> dict[str, float]:
        """Add the counts of servers to the metrics of the step. Returns by how much each has grown since the last
        call."""
        grown = dict[str, float]()
        counts = _numbers(replicas)
        for name, value in counts.items():
            grown[name] = value - self._counts.get(name, 0)
            key = f"replicas/{name}"
            if name in ("ready", "of"):  # of this moment
                self.metrics[key] = value
            else:
                self.metrics[key] = self.metrics.get(key, 0.0) + grown[name]
        self._counts = counts
        return grown


@contextmanager
def engine_errors() -> Iterator[None]:
    """Convert a `ServerError`, raised after all retries, to a `UserError`."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, ServerError):
            raise
        raise UserError(str(error), remedy=RESUME) from error


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers; NaN marks a figure that was not measured."""
    numbers = dict[str, float]()
    for name, value in figures.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers[name] = float(value)
    return numbers
