"""A run from its config: check, open, load, build, loop, summarise. What `proxima train` calls."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from proxima import __version__
from proxima.config.dump import dump
from proxima.config.estimate import at_once, pruned
from proxima.data import Group, UserError
from proxima.model import LoadedModel
from proxima.runtime.build import RunData, load_model, load_run_data, make_controller
from proxima.runtime.carried_groups import CARRIED_GROUPS, read_groups
from proxima.runtime.clock import Clock, SystemClock
from proxima.runtime.environment import describe_environment
from proxima.runtime.folder import RunFolder
from proxima.runtime.interrupt import quiet_transformers, stop_on_interrupt
from proxima.runtime.journal import Journal
from proxima.runtime.observer import NullObserver, Observer, RunInfo
from proxima.runtime.resume_check import check_resume, schedule_note
from proxima.runtime.store import RunStore
from proxima.runtime.summary import Summary, algorithm_name, summarise_run
from proxima.train.checkpoint import Checkpoint, checkpoints, restore

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
) -> Summary:
    """Train as the config says; everything the run leaves is in its folder.

    Args:
        resolved: the config with provenance, for config.yaml; None writes it without.
        resume: go on with the run in the folder, from its last whole checkpoint; begins one where there is none.
        overwrite: delete the run in the folder first.

    Raises:
        ValueError: something about config, data, folder or model, in one line, before weights are loaded wherever that
            is possible.
    """
    observer, clock = observer or NullObserver(), clock or SystemClock()
    folder = RunFolder(_folder_of(config, resolved, clock))
    folder.check(resume=resume, overwrite=overwrite)
    with quiet_transformers():
        opened = load_run_data(
            config
        )  # tokenizer and data: their errors come before the folder is touched and the weights are read
        resuming = folder.begin(resume=resume, overwrite=overwrite)
        try:
            return asyncio.run(_train(config, resolved, opened, folder, resuming, observer, clock))
        finally:
            folder.release()


async def _train(
    config: "RunConfig",
    resolved: "Resolved[RunConfig] | None",
    opened: RunData,
    folder: RunFolder,
    resuming: bool,
    observer: Observer,
    clock: Clock,
) -> Summary:
    checkpoint, carried = None, list[Group]()
    if resuming:  # the run's own word on its config comes before the weights are read
        with Journal(folder.journal, clock) as journal:
            check_resume(journal, config)
            last = journal.step
            checkpoint, carried = _rewind(folder, journal, opened)
            if journal.step < last:
                place = (
                    f"the checkpoint of step {journal.step}" if checkpoint else "the beginning, there is no checkpoint"
                )
                observer.warning(
                    f"resuming from {place}: {last - journal.step} finished steps are made again; see checkpoint.every"
                )
    observer.progress("load", 0, 1, "models")
    loaded = _load(config, checkpoint)
    with Journal(folder.journal, clock) as journal:  # from here on there is a run in the folder
        check_resume(journal, config)
        if note := schedule_note(journal, config):
            observer.warning(note)
        if resolved is not None:
            folder.write_config(dump(resolved))
        controller = make_controller(
            config, loaded, opened, RunStore(journal, folder), observer=observer, clock=clock, carried=carried
        )
        if checkpoint:
            restore(checkpoint, controller.learner.stack)
        facts = {"path": config.model.path, "revision": config.model.revision, "parameters": loaded.parameters}
        folder.write_environment(describe_environment(config.seed, facts))
        observer.started(_info(config, loaded, folder, journal.step, len(opened.held_out)))
        for note in opened.notes:
            observer.warning(note)
        status, error = "failed", None
        try:
            with stop_on_interrupt(controller):
                status = "done" if await controller.run() else "stopped"
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}".removesuffix(": ")
            raise
        finally:
            controller.collector.generator.rewards.close()
            summary = summarise_run(config, folder, journal, status, controller.now(), error)
            folder.write_summary(asdict(summary))
            observer.finished(asdict(summary))
    return summary


def _load(config: "RunConfig", checkpoint: Checkpoint | None) -> LoadedModel:
    """The weights to go on with."""
    if checkpoint is None:
        return load_model(config)
    try:
        return load_model(config, str(checkpoint.model))
    except ValueError as error:
        raise UserError(f"{checkpoint.path}: {error}; delete this checkpoint to use the one before") from error


def _rewind(folder: RunFolder, journal: Journal, opened: RunData) -> tuple[Checkpoint | None, list[Group]]:
    """Put journal, records and data cursor back to the last whole checkpoint, to the beginning where there is none;
    with its surplus."""
    whole = checkpoints(folder.checkpoints)
    checkpoint = whole[-1] if whole else None
    step = checkpoint.step if checkpoint else 0
    journal.rewind(step)
    folder.rewind(step)
    if checkpoint is None:
        return None, []
    opened.source.load(checkpoint.facts["cursor"])
    carried = read_groups(checkpoint.path / CARRIED_GROUPS, checkpoint.facts.get("pending", []))
    journal.generating(
        group.prompt.uid for group in carried
    )  # the rewind queued them: they were admitted before and not consumed
    journal.scored(carried)
    return checkpoint, carried


def _folder_of(config: "RunConfig", resolved: "Resolved[RunConfig] | None", clock: Clock) -> Path:
    if config.folder:
        return Path(config.folder).expanduser()
    name = Path(resolved.recipe).stem if resolved is not None and resolved.recipe else "run"
    stamp = clock.wall()[:19].replace("-", "").replace(":", "").replace("T", "-")
    return Path("runs") / f"{name}-{stamp}"


def _info(config: "RunConfig", loaded: LoadedModel, folder: RunFolder, step: int, questions: int) -> RunInfo:
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
    )
