"""A run, of whatever kind: folder, journal, resume, loop, Ctrl-C, summary. What every training command goes through."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from proxima.config.dump import dump
from proxima.data import UserError
from proxima.model import LoadedModel
from proxima.model.compute_thread import ComputeThread
from proxima.runtime.clock import Clock, SystemClock
from proxima.runtime.environment import describe_environment
from proxima.runtime.folder import RunFolder
from proxima.runtime.inputs import check_inputs, numerics_note
from proxima.runtime.interrupt import quiet_transformers, signals_restored, stop_on_interrupt
from proxima.runtime.journal import Journal
from proxima.runtime.loop import TrainingLoop
from proxima.runtime.observer import Observer, RunInfo, WarningList
from proxima.runtime.resume import check_resume, rewind_run, schedule_note
from proxima.runtime.store import RunStore
from proxima.runtime.summary import Summary, summarise_run
from proxima.train.checkpoint import Checkpoint, restore

if TYPE_CHECKING:
    from proxima.config import Resolved


class Workload(Protocol):
    """What a run does between its beginning and its end. It knows its data when it is made, and has no weights yet.

    config: the config of a training command.
    steps: of the whole run.
    notes: warnings about the data.
    """

    config: Any
    notes: list[str]

    @property
    def steps(self) -> int: ...

    def hashes(self) -> dict[str, str]:
        """SHA-256 of everything that the run reads, by what it is called in a message."""
        ...

    def rewind(self, checkpoint: Checkpoint, journal: Journal) -> None:
        """Restore the data cursor, and what the checkpoint kept beside weights and optimizer."""
        ...

    def load(self, path: str | None) -> LoadedModel:
        """The model of the config, or that of a checkpoint in `path`. Called in the compute thread."""
        ...

    def make_loop(
        self, loaded: LoadedModel, store: RunStore, compute: ComputeThread, observer: Observer, clock: Clock
    ) -> TrainingLoop:
        """Everything that the loop touches, and the loop."""
        ...

    def info(self, loaded: LoadedModel, folder: Path, step: int) -> RunInfo:
        """What is known at the start, or where the run resumes after `step`."""
        ...

    def facts(self, journal: Journal) -> Mapping[str, Any]:
        """`algorithm` and, where there is one, `replay`, for summary.json."""
        ...

    def close(self) -> None:
        """Release what was opened, whether the run began or not."""
        ...


def execute(
    make: Callable[[], Workload],
    config: Any,
    *,
    resolved: "Resolved[Any] | None" = None,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    clock: Clock | None = None,
) -> Summary:
    """Run a workload as its config says; all results are in the run folder.

    Args:
        make: reads the data; its errors leave the folder untouched.
        config, resolved: the config, and with provenance for config.yaml; None writes no config.yaml.
        resume: continue the run in the folder from its last complete checkpoint; starts one if there is none.
        overwrite: delete the run in the folder first.

    Raises:
        UserError: something is wrong with config, data, folder or model; before weights are loaded wherever possible.
        RunEnded: the run can't continue.
    """
    observer, clock = observer or Observer(), clock or SystemClock()
    folder = RunFolder(_run_folder(config, resolved, clock))
    folder.check(resume=resume, overwrite=overwrite)
    with quiet_transformers():
        workload = make()
        resuming = folder.begin(resume=resume, overwrite=overwrite)
        try:
            compute = ComputeThread()
            with signals_restored():
                return compute.serve(_run(workload, resolved, folder, resuming, compute, observer, clock))
        finally:
            folder.release()
            workload.close()


async def _run(
    work: Workload,
    resolved: "Resolved[Any] | None",
    folder: RunFolder,
    resuming: bool,
    compute: ComputeThread,
    observer: Observer,
    clock: Clock,
) -> Summary:
    config, checkpoint = work.config, None
    if resuming:
        with Journal(folder.journal, clock) as journal:
            check_resume(journal, config)
            check_inputs(journal, work.hashes())
            checkpoint = rewind_run(folder, journal, observer)
            if checkpoint is not None:
                work.rewind(checkpoint, journal)
    observer.progress("load", 0, 1, "models")
    hashing = None if resuming else asyncio.create_task(asyncio.to_thread(work.hashes))  # beside the loading
    loaded = await compute.run(_load_weights, work, checkpoint)
    with Journal(folder.journal, clock) as journal:  # from here on the folder contains a run
        check_resume(journal, config)
        if hashing is not None:
            check_inputs(journal, await hashing)
        schedule = schedule_note(journal, config.train.schedule, work.steps)
        for note in filter(None, (schedule, numerics_note(journal, config))):
            observer.warning(note)
        if resolved is not None:
            folder.write_config(dump(resolved))
        loop = work.make_loop(loaded, RunStore(journal, folder), compute, observer, clock)
        if checkpoint:
            await compute.run(restore, checkpoint, loop.trained.stack, loop.trained.others)
        model = {"path": config.model.path, "revision": config.model.revision, "parameters": loaded.parameters}
        folder.write_environment(describe_environment(config.seed, model))
        observer.started(work.info(loaded, folder.path, journal.step))
        for note in work.notes:
            observer.warning(note)
        status, error, recorded = "failed", None, len(folder.read_metrics())
        try:
            stop_on_interrupt(loop, compute)
            status = "done" if await loop.run() else "stopped"
        except (asyncio.CancelledError, KeyboardInterrupt):  # a second Ctrl-C
            status, error = "stopped", "interrupted"
            raise
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}".removesuffix(": ")
            raise
        finally:
            loop.close()
            finished_before = resuming and status == "done" and len(folder.read_metrics()) == recorded
            seconds = folder.elapsed() if finished_before else loop.now()
            summary = summarise_run(config, folder, journal, status, seconds, error)
            summary = _with_views(replace(summary, **work.facts(journal)), folder, observer)
            folder.write_summary(asdict(summary))
            observer.finished(asdict(summary))
    return summary


def _with_views(summary: Summary, folder: RunFolder, observer: Observer) -> Summary:
    """With what the views know: links, and warnings after those of the run before its resume."""
    links = observer.ending()  # first: it may warn
    told = WarningList()
    for warning in (*folder.earlier_warnings, *observer.warned()):
        told.add(**warning)
    return replace(summary, links=links, warnings=told.records())


def _load_weights(work: Workload, checkpoint: Checkpoint | None) -> LoadedModel:
    if checkpoint is None:
        return work.load(None)
    try:
        return work.load(str(checkpoint.model))
    except ValueError as error:
        remedy = "delete this checkpoint to use the one before"
        raise UserError(f"{checkpoint.path}: {error}", remedy=remedy) from error


def _run_folder(config: Any, resolved: "Resolved[Any] | None", clock: Clock) -> Path:
    if config.folder:
        return Path(config.folder).expanduser()
    name = Path(resolved.recipe).stem if resolved is not None and resolved.recipe else "run"
    stamp = clock.wall()[:19].replace("-", "").replace(":", "").replace("T", "-")
    return Path("runs") / f"{name}-{stamp}"
