"""A run from its config: validate, load, build, loop, summarise. What `proxima train` calls."""

import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from proxima import __version__
from proxima.config.dump import dump
from proxima.config.estimate import at_once, pruned
from proxima.data import Group, UserError
from proxima.model import LoadedModel
from proxima.model.compute_thread import ComputeThread
from proxima.runtime.build import RunData, StageFactory, load_model, load_run_data, make_controller
from proxima.runtime.clock import Clock, SystemClock
from proxima.runtime.environment import describe_environment
from proxima.runtime.folder import RunFolder
from proxima.runtime.inputs import check_inputs, check_replayed_rewards, input_hashes, numerics_note
from proxima.runtime.interrupt import quiet_transformers, signals_restored, stop_on_interrupt
from proxima.runtime.journal import Journal
from proxima.runtime.observer import Observer, RunInfo, WarningList
from proxima.runtime.replay import StoredRollouts
from proxima.runtime.resume import check_resume, prepare_resume, schedule_note
from proxima.runtime.store import RunStore
from proxima.runtime.summary import Summary, algorithm_name, summarise_run
from proxima.train.checkpoint import Checkpoint, restore

if TYPE_CHECKING:
    from proxima.config import Resolved
    from proxima.config.schema import RunConfig


def train(
    config: "RunConfig",
    *,
    resolved: "Resolved[RunConfig] | None" = None,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    clock: Clock | None = None,
    stages: StageFactory | None = None,
) -> Summary:
    """Train as the config says; all results are in the run folder.

    Args:
        resolved: the config with provenance, for config.yaml; None writes no config.yaml.
        resume: continue the run in the folder from its last complete checkpoint; starts one if there is none.
        overwrite: delete the run in the folder first.
        stages: from the trained policy to forward stages beside those of the loss, such as a critic for `gae`. They
            must be the same at each resume.

    Raises:
        UserError: something is wrong with config, data, folder or model; before weights are loaded wherever possible.
        RunEnded: the run can't continue.
    """
    observer, clock = observer or Observer(), clock or SystemClock()
    folder = RunFolder(_run_folder(config, resolved, clock))
    folder.check(resume=resume, overwrite=overwrite)
    with quiet_transformers():
        data = load_run_data(config)  # first: its errors leave the folder untouched
        check_replayed_rewards(config)
        resuming = folder.begin(resume=resume, overwrite=overwrite)
        try:
            compute = ComputeThread()
            with signals_restored():
                return compute.serve(_train(config, resolved, data, folder, resuming, compute, observer, clock, stages))
        finally:
            folder.release()
            if isinstance(data.source, StoredRollouts):
                data.source.close()


async def _train(
    config: "RunConfig",
    resolved: "Resolved[RunConfig] | None",
    data: RunData,
    folder: RunFolder,
    resuming: bool,
    compute: ComputeThread,
    observer: Observer,
    clock: Clock,
    stages: StageFactory | None,
) -> Summary:
    checkpoint, carried = None, list[Group]()
    if resuming:
        with Journal(folder.journal, clock) as journal:
            checkpoint, carried = prepare_resume(config, data, folder, journal, observer)
    observer.progress("load", 0, 1, "models")
    hashing = (  # beside the loading; a resume has compared them
        None
        if resuming
        else asyncio.create_task(asyncio.to_thread(input_hashes, config, data.source, data.held_out_rows))
    )
    loaded = await compute.run(_load_weights, config, checkpoint)
    with Journal(folder.journal, clock) as journal:  # from here on the folder contains a run
        check_resume(journal, config)
        if hashing is not None:
            check_inputs(journal, await hashing)
        for note in filter(None, (schedule_note(journal, config), numerics_note(journal, config))):
            observer.warning(note)
        if resolved is not None:
            folder.write_config(dump(resolved))
        store = RunStore(journal, folder)
        controller = make_controller(
            config, loaded, data, store, compute, observer=observer, clock=clock, carried=carried, stages=stages
        )
        if checkpoint:
            await compute.run(restore, checkpoint, controller.learner.stack)
        model = {"path": config.model.path, "revision": config.model.revision, "parameters": loaded.parameters}
        folder.write_environment(describe_environment(config.seed, model))
        observer.started(_run_info(config, loaded, folder, journal.step, data.questions))
        for note in data.notes:
            observer.warning(note)
        status, error, recorded = "failed", None, len(folder.read_metrics())
        try:
            stop_on_interrupt(controller, compute)
            status = "done" if await controller.run() else "stopped"
        except (asyncio.CancelledError, KeyboardInterrupt):  # a second Ctrl-C
            status, error = "stopped", "interrupted"
            raise
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}".removesuffix(": ")
            raise
        finally:
            controller.close()
            finished_before = resuming and status == "done" and len(folder.read_metrics()) == recorded
            seconds = folder.elapsed() if finished_before else controller.now()
            summary = summarise_run(config, folder, journal, status, seconds, error)
            summary = _with_views(summary, folder, observer)
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


def _load_weights(config: "RunConfig", checkpoint: Checkpoint | None) -> LoadedModel:
    if checkpoint is None:
        return load_model(config)
    try:
        return load_model(config, str(checkpoint.model))
    except ValueError as error:
        remedy = "delete this checkpoint to use the one before"
        raise UserError(f"{checkpoint.path}: {error}", remedy=remedy) from error


def _run_folder(config: "RunConfig", resolved: "Resolved[RunConfig] | None", clock: Clock) -> Path:
    if config.folder:
        return Path(config.folder).expanduser()
    name = Path(resolved.recipe).stem if resolved is not None and resolved.recipe else "run"
    stamp = clock.wall()[:19].replace("-", "").replace(":", "").replace("T", "-")
    return Path("runs") / f"{name}-{stamp}"


def _run_info(config: "RunConfig", loaded: LoadedModel, folder: RunFolder, step: int, questions: int) -> RunInfo:
    train = config.train
    prompts, kept = pruned(train.prompts_per_step, train.completions_per_prompt, config.algorithm.selection)
    return RunInfo(
        version=__version__,
        algorithm=algorithm_name(config),
        model=Path(config.model.path).name,
        parameters=loaded.parameters,
        device=str(loaded.model.device),
        threads=torch.get_num_threads(),
        dtype=config.model.compute_dtype,
        seed=config.seed,
        folder=folder.path,
        steps=train.steps,
        resumed_at=step,
        prompts=prompts,
        completions=train.completions_per_prompt,
        kept=kept,
        at_once=at_once(prompts, config.algorithm.dynamic_sampling),
        tokens_per_micro_batch=train.tokens_per_micro_batch,
        updates=train.updates_per_step * train.epochs_per_step,
        questions=questions,
        replay_of=config.replayed,
    )
