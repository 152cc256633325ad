"""A run of any kind: folder, journal, resume, loop, Ctrl-C, summary. Every training calls `train`."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from proxima.config.families import family_of_config
from proxima.config.outcomes import decided_dtypes, outcomes_of, settled, with_values
from proxima.config.resolved import Resolved, dump
from proxima.config.schema import RunConfig
from proxima.config.sections.offline import OfflineConfig
from proxima.config.validate import require_proven
from proxima.data import UserError
from proxima.model.chat.template_inputs import clock_notes, fixed_clock
from proxima.model.compute_thread import ComputeThread
from proxima.model.input_files import left_out_note, left_out_of
from proxima.model.precision import product_rate
from proxima.model.pretrained import LoadedModel, resolve_device, without_progress_bars
from proxima.runtime.launch.offline_workload import OfflineWorkload
from proxima.runtime.launch.rl_workload import RlWorkload
from proxima.runtime.loop.device_figures import planned_memory
from proxima.runtime.loop.training_loop import RunEnded, RunServices, TrainingLoop, Workload
from proxima.runtime.placement.follower import RankModels, follow, read_when_visible
from proxima.runtime.placement.rendezvous import agree_on_files, ranks_of
from proxima.runtime.resume.changes import (
    check_inputs,
    check_resume,
    date_of_run,
    dtypes_of_run,
    start_notes,
    with_date,
)
from proxima.runtime.resume.restore import prepare_resume, report_finished
from proxima.runtime.state.folder import RunFolder, new_run_folder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.store import RunStore
from proxima.runtime.state.summary import Ending, Summary, summarise_run
from proxima.runtime.watch.activity import Activity
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.disk import Disk, StoppedWaiting
from proxima.runtime.watch.interrupt import signals_restored, stop_on_interrupt
from proxima.runtime.watch.observer import Observer
from proxima.runtime.watch.timeline import Timeline
from proxima.system.machine import describe_environment
from proxima.training.checkpoint import DELETE, Checkpoint, read_checkpoint, restore
from proxima.training.ranks import Ranks, Start
from proxima.training.stack import POLICY

Mode = Literal["new", "resume", "change"]


def train(
    config: RunConfig | OfflineConfig,
    *,
    resolved: Resolved[Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    accept_changes: bool = False,
    observer: Observer | None = None,
    clock: Clock | None = None,
) -> Summary:
    """Train as the config says, with the method of its class; all results are written to the run folder.

    Args:
        config, resolved: the config, and the same with provenance, for config.yaml; None writes no config.yaml.
        resume: continue the run in the folder from its last complete checkpoint; start a new run if there is none.
        overwrite: delete the run in the folder first.
        accept_changes: resume a run whose algorithm, rewards or the like have changed; the run records the changes.

    Raises:
        UserError: something is wrong with config, data, folder or model; before weights are loaded wherever possible.
        RunEnded: the run can't continue.
    """
    observer = observer or Observer()
    clock = clock or Clock()
    with ranks_of(config) as ranks, without_progress_bars(), ExitStack() as opened:
        if ranks.rank > 0:
            make_work = partial(_workload, observer=observer)
            return follow(partial(start_rank, config, make_work, ranks), ranks)
        recipe = None if resolved is None else resolved.recipe
        folder = RunFolder(new_run_folder(config.folder, recipe, clock))
        folder.check(resume=resume, overwrite=overwrite)
        if resolved is not None:
            require_proven(resolved)
        dtypes = dtypes_of_run(config, folder if resume else None)
        config, resolved = settled(config, resolved, dtypes)
        if resume and config.data.template_date is None:
            date = date_of_run(folder)
            if date is not None:
                config, resolved = with_date(config, resolved, date)
        configured = config.data.template_date
        template_clock = opened.enter_context(fixed_clock(configured))
        # reads the data; its errors leave the folder untouched
        workload = opened.enter_context(closing(_workload(config, observer)))
        if template_clock.named and configured is None:
            workload.config, resolved = with_date(config, resolved, template_clock.date)
        workload.chosen += [*dtypes, *outcomes_of(config)]
        workload.notes += clock_notes(template_clock, configured)
        opened.callback(folder.release)
        mode: Mode = "new"
        if folder.begin(resume=resume, overwrite=overwrite):
            mode = "change" if accept_changes else "resume"
        workload.notes += folder.warnings
        try:
            compute = ComputeThread()
            with signals_restored():
                return compute.serve(_run(workload, resolved, folder, mode, compute, ranks, observer, clock))
        except Exception as error:
            gone = folder.is_gone
            failure = None if ranks.monitor is None else ranks.monitor.cause(error)
            if isinstance(error, UserError) or (failure is not None and failure.refused):
                folder.discard()
            if not gone:
                raise
            message = f"{folder.path} was moved or deleted during the run"
            remedy = "resume it where it is now (proxima train FOLDER --resume), or start it again"
            raise UserError(message, remedy=remedy) from error


def _workload(config: RunConfig | OfflineConfig, observer: Observer) -> RlWorkload | OfflineWorkload:
    if isinstance(config, RunConfig):
        return RlWorkload(config)
    family = family_of_config(config)
    assert family is not None
    return OfflineWorkload(config, family, observer)


async def _run(
    work: Workload,
    resolved: Resolved[Any] | None,
    folder: RunFolder,
    mode: Mode,
    compute: ComputeThread,
    ranks: Ranks,
    observer: Observer,
    clock: Clock,
) -> Summary:
    config = work.config
    disk = Disk(folder.path, observer.warning)
    resuming = mode != "new"
    checkpoint = None
    hashes = cache(work.hashes)  # the files may be large
    with cancelled_with(ranks, folder.log, observer.warning):
        if resuming:
            checkpoint = await disk.write(prepare_resume, work, hashes, folder, clock, observer, mode == "change")
            finished = await disk.write(report_finished, work, resolved, folder, clock, observer)
            if finished:
                await compute.run(ranks.end, finished)
                return finished
        observer.progress("load", 0, 1, "models")
        decided = decided_dtypes(config, work.chosen)
        restored = None if checkpoint is None else checkpoint.path
        hashing = None
        with ranks.call(Start(folder.path, restored, decided)):
            await compute.run(_compare_files, hashes, ranks)
            if not resuming:  # while the model is loaded
                hashing = asyncio.create_task(asyncio.to_thread(hashes))
            loaded = await compute.run(load_models, work.load, checkpoint)
        with await disk.write(Journal, folder.journal, clock) as journal, ExitStack() as opened:  # now a run folder
            await disk.write(check_resume, journal, config)
            if hashing is not None:
                await disk.write(check_inputs, journal, await hashing)
            for note in await disk.write(start_notes, journal, config, work.steps):
                observer.warning(note)
            activity = Activity(clock, folder.elapsed(), Timeline(folder.timeline, observer.warning))
            store = RunStore(journal, folder, disk, activity, ranks)
            if resolved is not None:
                await disk.write(folder.write_config, dump(resolved, folder.config))
            planned = planned_memory(resolved, resolve_device(config.model.device))
            loop = work.make_loop(loaded, RunServices(store, compute, observer, opened, planned))
            if checkpoint:
                await compute.run(restore, checkpoint, loop.stack, loop.others)
            await disk.write(folder.write_environment, _environment(config, loaded))
            model = loop.stack.model
            await compute.run(product_rate, model.compute_dtype, model.device)  # while nothing else computes
            folder.remove_outcome()
            observer.started(work.info(loaded, folder.path, journal.step))
            for note in (*work.notes, *left_out_notes(loop)):
                observer.warning(note)
            ending = Ending(status="failed")
            try:
                losing = ranks.losing if ranks.size > 1 else None
                stop_on_interrupt(loop.stop, observer.warning, compute, losing)
                done = await loop.run()
                ending = Ending(status="done" if done else "stopped")
            except BaseException as problem:
                ending = _ending(problem, ranks, disk)
                raise
            finally:
                opened.close()
                summary = summarise_run(config, work.facts(journal), folder, journal, observer, ending, loop.now())
                await _write_summary(summary, folder, disk, observer)
                observer.finished(asdict(summary))
                if not ranks.losing():
                    await compute.run(ranks.end, summary)
    return summary


def left_out_notes(loop: TrainingLoop) -> list[str]:
    """Which weights of the inputs of a loop's models are in nothing that the run writes."""
    notes = []
    for stack in (loop.stack, *loop.others.values()):
        left_out = left_out_of(stack.model.loaded.model)
        notes.append(left_out_note(left_out))
    return [note for note in notes if note is not None]


def load_models(load: Callable[[str | None], LoadedModel], checkpoint: Checkpoint | None) -> LoadedModel:
    """The weights of a run, or those of the checkpoint that it resumes from; `load` is that of its workload."""
    path = None if checkpoint is None else str(checkpoint.model)
    try:
        loaded = load(path)
    except ValueError as error:
        if checkpoint is None:
            raise
        raise UserError(f"{checkpoint.path}: {error}", remedy=DELETE) from error
    if not gc.isenabled():  # disabled by the command line; imported objects live until the end
        gc.freeze()
        gc.enable()
    return loaded


def _compare_files(hashes: Callable[[], dict[str, str]], ranks: Ranks) -> None:
    """Check that every node reads the same files. Collective."""
    if ranks.size > 1:
        agree_on_files(hashes, ranks)


def _environment(config: RunConfig | OfflineConfig, loaded: LoadedModel) -> dict[str, Any]:
    model = {"path": config.model.path, "revision": config.model.revision, "parameters": loaded.parameters}
    return describe_environment(config.seed, model)


async def _write_summary(summary: Summary, folder: RunFolder, disk: Disk, observer: Observer) -> None:
    try:
        await disk.write(folder.write_summary, asdict(summary))
    except StoppedWaiting as full:
        observer.warning(f"{full}: the run has no summary.json until it is resumed")


def _ending(problem: BaseException, ranks: Ranks, disk: Disk) -> Ending:
    """How a run ends with an exception."""
    failure = None if ranks.monitor is None else ranks.monitor.cause(problem)
    if failure is not None:
        disk.stop.set()
        return Ending(status="failed", error=failure.text)
    if isinstance(problem, asyncio.CancelledError | KeyboardInterrupt):  # a second Ctrl-C
        disk.stop.set()
        return Ending(status="stopped", error="interrupted")
    if isinstance(problem, RunEnded):
        return Ending(status=problem.status, error=str(problem), resumable=problem.resumable)
    if isinstance(problem, UserError):
        return Ending(status="failed", error=str(problem))
    return Ending(status="failed", error=f"{type(problem).__name__}: {problem}".removesuffix(": "))


def start_rank(
    config: RunConfig | OfflineConfig,
    make_work: Callable[[RunConfig | OfflineConfig], RlWorkload | OfflineWorkload],
    ranks: Ranks,
    message: Start,
) -> RankModels:
    """Do on another rank what the run does on rank 0: data, files, weights, the state of a checkpoint; `make_work`
    makes its workload from the config, in which `auto` is what rank 0 has decided."""
    read_when_visible("run folder", message.folder, Path.is_dir)
    decided, _ = with_values(config, None, message.decided)
    work = make_work(decided)
    images = work.images
    if images is not None:
        images.follow(message.folder / "images")
    agree_on_files(work.hashes, ranks)
    checkpoint = None
    if message.checkpoint is not None:
        checkpoint = read_when_visible("checkpoint", message.checkpoint, read_checkpoint)
    loaded = load_models(work.load, checkpoint)
    models: RankModels = work.rank_models(loaded, ComputeThread(), ranks, message.checkpoint)
    if checkpoint is not None:
        restore(checkpoint, models.stacks[POLICY], models.others)
    return models


@contextmanager
def cancelled_with(ranks: Ranks, log: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Within the block, the run is cancelled if another rank fails; `warn` is called in the event loop."""
    if ranks.monitor is None:
        yield
        return
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def warn_in_loop(text: str) -> None:
        loop.call_soon_threadsafe(warn, text)

    def cancel_in_loop() -> None:
        loop.call_soon_threadsafe(task.cancel)

    with ranks.monitor.attached(log, warn_in_loop, cancel_in_loop):
        try:
            yield
        except asyncio.CancelledError as error:
            if ranks.monitor.cause(error) is None:
                raise
            raise RuntimeError("cancelled, as a rank has failed") from error  # `rendezvous` reports which one
