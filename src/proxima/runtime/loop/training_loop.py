"""The common part of all training loops: when to evaluate and save, how to stop, and how to end.

`Controller` is the loop of RL, `OfflineLoop` that over a fixed data set.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar

from proxima.config.outcomes import Outcome
from proxima.config.schema import RunConfig
from proxima.config.sections.eval import EvalConfig
from proxima.config.sections.offline import OfflineConfig, OfflineEvalConfig
from proxima.data import NotFiniteError, UserError
from proxima.engine.protocol import Health, StoppedWaitingError, stop_waiting
from proxima.model.compute_thread import ComputeThread, Progress
from proxima.model.pretrained import LoadedModel
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.run_checkpoints import prune_checkpoints
from proxima.runtime.state.store import RunStore
from proxima.runtime.watch.disk import StoppedWaiting
from proxima.runtime.watch.observer import Observer, RunInfo, Stage
from proxima.runtime.watch.stall import StallWatch
from proxima.runtime.watch.step_notes import CoreShare, why_untrained
from proxima.training.checkpoint import Checkpoint, CheckpointContents, checkpoints, read_checkpoint
from proxima.training.ranks import RankError
from proxima.training.stack import TrainStack

T = TypeVar("T")
RESUME_CHANGED = "resume (--resume, with --accept-changes where its file or fields have changed)"


@dataclass(frozen=True)
class RunServices:
    """The store (journal and folder) of a run, its compute thread and observer; `opened` is closed when the run
    ends; see `planned_memory`."""

    store: RunStore
    compute: ComputeThread
    observer: Observer
    opened: ExitStack
    planned_memory: int | None = None


class Workload(Protocol):
    """The work of a run, built from its config with its data, before weights are loaded."""

    notes: list[str]  # warnings about the data
    chosen: list[Outcome]  # of fields that are `auto`
    steps: int  # of the whole run

    @property
    def config(self) -> RunConfig | OfflineConfig: ...

    @property
    def has_held_out(self) -> bool:
        """True if there are held-out questions or items."""
        ...

    def hashes(self) -> dict[str, str]:
        """SHA-256 of every input of the run, keyed by its name in messages."""
        ...

    def rewind(self, checkpoint: Checkpoint, journal: Journal) -> None:
        """Restore the data cursor and all other state in the checkpoint except weights and optimizer."""
        ...

    def load(self, path: str | None) -> LoadedModel:
        """The model of the config, or that of a checkpoint in `path`. Called in the compute thread."""
        ...

    def make_loop(self, loaded: LoadedModel, services: RunServices) -> "TrainingLoop":
        """The loop and everything that it uses."""
        ...

    def info(self, loaded: LoadedModel | None, folder: Path, finished: int) -> RunInfo:
        """The facts known at the start, or when the run resumes after `finished` steps; `loaded` is None if no step is
        left, so that no model is needed."""
        ...

    def facts(self, journal: Journal) -> Mapping[str, Any]:
        """Fields of `Summary`."""
        ...


class Stopped(Exception):
    """The user stopped the run; the unfinished step is discarded, and a resume repeats it."""


class RunEnded(Exception):
    """The run can't continue, for a reason other than a bug; the message says why and what to do.

    Args:
        reported: the message was already printed to standard error.
        resumable: a plain resume may continue the run; False if it would end in the same way.
    """

    status: ClassVar[str] = "failed"  # in summary.json

    def __init__(self, message: str, *, reported: bool = False, resumable: bool = True) -> None:
        super().__init__(message)
        self.reported = reported
        self.resumable = resumable


class NothingTrained(RunEnded):
    """All steps are made, but none had a gradient. As of a trial of a few steps, which is no failure, but no training
    either: the exit code is 1."""

    status = "untrained"


def evaluation_is_due(settings: EvalConfig | OfflineEvalConfig, step: int) -> bool:
    """True if the section `eval` requests an evaluation after this step, during the run."""
    return bool(step and settings.every and step % settings.every == 0)


def plateau_reached(settings: EvalConfig | OfflineEvalConfig, journal: Journal) -> bool:
    """True if the evaluations so far end the run by `eval.stop_after`."""
    rule = settings.stop_after
    return rule is not None and bool(rule.reached(journal.get("evaluations") or ()))


class TrainingLoop:
    """Makes all steps of a run, with evaluations and checkpoints between them. A subclass defines a step (`train`), an
    evaluation (`evaluate`) and the content of a checkpoint besides the weights (`checkpoint_contents`).

    Args:
        config: of the run; says when to evaluate, save and end.
        steps: number of steps of the whole run.
        stack: the weights, with optimizer and schedule, which a checkpoint stores.
        services: compute thread, files and observer.
    """

    others: Mapping[str, TrainStack] = MappingProxyType({})  # further models, by their folder in a checkpoint
    generator: GroupGenerator | None = None  # engine and rewards that the steps wait for; None: they need none

    def __init__(self, config: RunConfig | OfflineConfig, steps: int, stack: TrainStack, services: RunServices) -> None:
        store = services.store
        self.config = config
        self.steps = steps
        self.stack = stack
        self.compute = services.compute
        self.planned_memory = services.planned_memory
        self.store = store
        self.journal = store.journal
        self.folder = store.folder
        self.observer = services.observer
        self.activity = store.activity
        self.disk = store.disk
        self.clock = store.activity.clock
        self._stop = store.disk.stop
        self.times: dict[str, float] = {}  # seconds of the stages of the step
        self._core_share = CoreShare()
        self._waited = 0.0  # seconds of the last step in which its threads waited for cores
        self.step_complete = True  # the weights are those after the last step of the journal

    async def train(self) -> None:
        """Make all remaining steps and evaluations."""
        raise NotImplementedError

    async def evaluate(self, label: str) -> None:
        """Evaluate the current weights on held-out data, at most once per step; `label` is `before`, `step` or
        `after`."""
        raise NotImplementedError

    def checkpoint_contents(self) -> tuple[dict[str, Any], dict[str, Callable[[Path], None]]]:
        """JSON facts, including the data cursor, and the functions that write further files, by file name."""
        raise NotImplementedError

    def on_health(self, health: Health) -> None:
        """Called with the engine's answer to each health check, at any moment of a step."""

    async def run(self) -> bool:
        """Train to the last step, or until `stop`; both end with a checkpoint, unless the user stops a run that waits
        for disk space.

        Returns: True when all steps are done; False if the user stopped the run.

        Raises:
            RunEnded, UserError: the run can't continue; a checkpoint is still written, unless the weights
                diverged or are in the middle of a step.
            RankError: another rank failed; no checkpoint is written.
        """
        watching = asyncio.create_task(self._stall_watch().run())
        try:
            return await self._run()
        except StoppedWaiting as error:  # perhaps in the middle of a step
            await self._end_writing()
            place = "from the start, without a checkpoint"
            saved = checkpoints(self.folder.checkpoints)
            if saved:
                place = f"from the checkpoint of step {saved[-1].step}"
            self.observer.warning(f"{error}: stopped without another checkpoint; --resume continues {place}")
            return False
        finally:
            watching.cancel()
            self.activity.timeline.close()

    async def _run(self) -> bool:
        """`run`, except when the user stops it while it waits for disk space.

        Raises:
            StoppedWaiting: he does.
        """
        done = True
        try:
            await self.train()
        except Stopped:
            done = False
        except NotFiniteError as error:  # the weights may be in the middle of a step: no checkpoint
            await self._end_writing()
            raise RunEnded(self.diverged(error), resumable=False) from error
        except (RunEnded, UserError, RankError) as error:
            if self.step_complete and not isinstance(error, RankError):
                with suppress(StoppedWaiting):
                    await self.checkpoint(self.journal.step)
            await self._end_writing()
            if not isinstance(error, StoppedWaitingError):
                raise
            self.observer.warning(f"stopped while the run waited for servers: {error}")
            return False
        await self._complete_checkpoint(self.journal.step)
        return done

    def _stall_watch(self) -> StallWatch:
        ranks = self.store.ranks.monitor
        return StallWatch(
            self.config.runtime.stall_seconds,
            self.activity,
            self.observer.warning,
            self.generator,
            self.on_health,
            None if ranks is None else ranks.late,
        )

    def stop(self) -> bool:
        """Ask the loop to end at the next point where nothing is half-done. Call it on the event loop. Returns True if
        at least one step is finished."""
        self._stop.set()
        if self.generator is not None:
            stop_waiting(self.generator.engine)
        return self.journal.step > 0

    @property
    def steps_left(self) -> bool:
        """True if another step follows: the run has steps left and has not reached a plateau."""
        return self.journal.step < self.steps and not plateau_reached(self.config.eval, self.journal)

    def evaluation_record(self, label: str, start: float) -> dict[str, Any]:
        """The first fields of the record of an evaluation that began at `start` and ends now."""
        now = self.now()
        step = {"kind": "eval", "step": self.journal.step, "label": label}
        return {**step, "time": now, "time/evaluate": now - start}

    async def keep_evaluation(self, record: Mapping[str, Any]) -> None:
        """Write the record of an evaluation, and pass it to the observer. RunEnded if the record lacks the metric of
        `eval.stop_after`."""
        await self.disk.write(self.journal.evaluated, record)
        await self.disk.write(self.store.append_metrics, record)
        self.observer.evaluated(record)
        rule = self.config.eval.stop_after
        if rule is None:
            return
        problem = rule.unknown(record)
        if problem:
            raise RunEnded(problem)

    @contextmanager
    def next_step(self) -> Iterator[int]:
        """Time the next step and yield its number; `times` then has the seconds of its stages."""
        step = self.journal.step + 1
        self.times = {}
        cpu = self.clock.cpu()
        waited = self.clock.core_wait()
        with self.timed("step", step=step):
            yield step
        self.times["cpu"] = self.clock.cpu() - cpu
        self._waited = max(0.0, self.clock.core_wait() - waited)

    def report_step(self, record: Mapping[str, Any]) -> None:
        """Pass a step's record to the observer, and a warning if its threads waited for cores."""
        self.observer.step(record)
        warning = self._core_share.add(self.times["cpu"], self._waited)
        if warning:
            self.observer.warning(warning)

    async def evaluate_first(self) -> None:
        """Evaluate before the first step, or after the last finished step if an interrupted run missed that
        evaluation."""
        if self.journal.step == 0 and self.config.eval.before:
            await self.evaluate("before")
        await self.evaluate_if_due(self.journal.step)

    async def evaluate_last(self) -> None:
        """Evaluate after the last step, if `eval.after` is set."""
        if self.config.eval.after:
            await self.evaluate("after")

    async def evaluate_if_due(self, step: int) -> None:
        if evaluation_is_due(self.config.eval, step):
            label = "after" if step == self.steps else "step"
            await self.evaluate(label)

    async def checkpoint_if_due(self, step: int) -> None:
        if self._stop.is_set():
            raise Stopped
        if self.config.checkpoint.every and step % self.config.checkpoint.every == 0:
            await self.checkpoint(step)

    async def checkpoint(self, step: int) -> None:
        """Write everything that a resume needs to a temporary folder, rename it, and delete older checkpoints. An
        existing checkpoint of the step is kept: a kill may have prevented the deletion of older ones."""
        await self.write_aside(self.store.finish_checkpoint)
        if step and read_checkpoint(self.folder.checkpoint(step)) is None:
            await self.write_checkpoint(step)
        prune_checkpoints(self.folder, self.config.checkpoint, leftovers=not self.store.ranks.writing)

    async def _complete_checkpoint(self, step: int) -> None:
        """Write the checkpoint of the last step. Several ranks write in the background; if a full disk ended that, try
        again."""
        await self.checkpoint(step)
        if self.store.ranks.writer is not None:
            await self.write_aside(self.store.finish_checkpoint)
            while step and read_checkpoint(self.folder.checkpoint(step)) is None:
                await self.checkpoint(step)
                await self.write_aside(self.store.finish_checkpoint)
            prune_checkpoints(self.folder, self.config.checkpoint)

    async def _end_writing(self) -> None:
        """Before the run ends with an error, let the ranks complete the checkpoint that they are writing, if they
        can."""
        ranks = self.store.ranks
        if ranks.writing and not ranks.in_call and not ranks.losing():
            with suppress(Exception):
                await self.compute.run(self.store.finish_checkpoint)

    async def write_checkpoint(self, step: int) -> None:
        self.observer.progress("checkpoint", 0, 1, "checkpoints")
        facts, files = self.checkpoint_contents()
        facts = {"policy_version": self.journal.version, "seed": self.config.seed, **facts}
        with self.activity.stage("checkpoint", step=step):
            contents = CheckpointContents(stack=self.stack, facts=facts, files=files, others=self.others)
            await self.write_aside(self.store.write_checkpoint, step, contents)

    def diverged(self, error: NotFiniteError) -> str:
        """Describe the step that could not be finished, and what to do. A plain resume is not suggested, because it
        would compute the same step again."""
        done = self.journal.step
        saved = [checkpoint.step for checkpoint in checkpoints(self.folder.checkpoints)]
        lower = "a lower train.optimizer.lr or train.max_grad_norm"
        if not saved:
            remedy = f"there is no checkpoint to resume from. Training diverges: start another run with {lower}"
        elif self.step_complete and saved[-1] == done:  # no update of this step has moved the weights
            remedy = f"the checkpoint of step {done} has these weights, and a resume would end here again. "
            remedy += f"Training diverges: start another run with {lower}"
        else:
            remedy = f"the checkpoint of step {saved[-1]} is finite. Resume from it with {lower} "
            remedy += "(--resume --accept-changes train.optimizer.lr=LR), or start another run with it"
        return f"step {done + 1}: {error}; {remedy}"

    def end_if_untrained(self) -> None:
        """Raise NothingTrained if no step of the run had a gradient: such a run is not done."""
        last = next(self.journal.history(), None)
        if last is None or any(record.get("grad_norm") for record in self.journal.history()):
            return
        reason = f"no step of {last['step']} trained anything; in the last one, {self.why_untrained(last)}"
        raise NothingTrained(reason, resumable=False)

    def why_untrained(self, record: Mapping[str, Any]) -> str:
        """Say why the step of this record, which had no gradient, trained nothing."""
        return why_untrained(record)

    async def write_aside(self, write: Callable[..., object], *arguments: object) -> None:
        """Write a large file in the compute thread, as soon as there is space for it."""
        await self.disk.retry_when_full(lambda: self.compute.run(write, *arguments))

    def now(self) -> float:
        """Seconds since the run began, over all resumes."""
        return self.activity.now()

    @contextmanager
    def timed(self, stage: str, **facts: object) -> Iterator[None]:
        """Time a stage of a step; its seconds are added to `times`, and its span with the `facts` to the timeline."""
        start = self.clock.now()
        try:
            with self.activity.stage(stage, **facts):
                yield
        finally:
            self.times[stage] = self.times.get(stage, 0.0) + self.clock.now() - start

    async def computed(self, stage: Stage, call: Callable[[Progress], T]) -> T:
        """Make a call in the compute thread and return its result; its progress is reported in tokens."""

        def report(done: int, total: int) -> None:
            self.progress(stage, done, total, "tokens")

        return await self.compute.run_with_progress(call, report)

    def progress(self, stage: Stage, done: int, total: int, unit: str) -> None:
        """Report the progress of the running stage to the observer."""
        self.activity.advanced(done, total, unit)
        self.observer.progress(stage, done, total, unit)

    async def cancel_on_stop(self, work: Awaitable[T]) -> T:
        """Return the result of an awaitable; raise `Stopped` and cancel it as soon as the user stops the run, even if
        the result is ready."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                raise Stopped
            return task.result()
        finally:
            task.cancel()
            stop.cancel()
