"""Restores a run as it was at its last intact checkpoint, before its loop continues; or reports one that has ended.

In the order of a resume: `prepare_resume` compares and rewinds, and restores the data (`restore_data`); then the
weights are loaded, and `training.checkpoint.restore` restores the optimizers.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from proxima.config.resolved import Resolved, dump
from proxima.data.pending import Pending
from proxima.runtime.loop.training_loop import Workload, evaluation_is_due, plateau_reached
from proxima.runtime.resume.changes import Change, check_inputs, check_resume, record_changes, start_notes
from proxima.runtime.resume.rewind import RestoredJournal, check_journal, rewind_run
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.pending_files import read_groups
from proxima.runtime.state.replay import StoredRollouts
from proxima.runtime.state.run_checkpoints import prune_checkpoints
from proxima.runtime.state.summary import Ending, Summary, summarise_run
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.observer import Observer
from proxima.runtime.watch.timeline import Timeline
from proxima.task.prompts import PromptSource
from proxima.training.checkpoint import CARRIED_GROUPS, Checkpoint


def prepare_resume(
    work: Workload,
    hashes: Callable[[], dict[str, str]],
    folder: RunFolder,
    clock: Clock,
    observer: Observer,
    accept: bool,
) -> Checkpoint | None:
    """Refuse a run that has changed, and restore everything but weights and optimizer to its state at the last
    checkpoint, which is returned; None: there is none. With `accept`, the user accepts changes."""
    with RestoredJournal(folder.journal, clock) as journal:
        check_journal(journal)
        changes = check_resume(journal, work.config, accept=accept)
        files = check_inputs(journal, hashes(), accept=accept)
        changes += [Change(field=name, before="another content", now="changed") for name in files]
        checkpoint = rewind_run(folder, journal, observer)
        record_changes(journal, work.config, changes)
        if files:
            journal.set("inputs", hashes())
        if checkpoint is not None:
            work.rewind(checkpoint, journal)
    return checkpoint


def report_finished(
    work: Workload, resolved: Resolved[Any] | None, folder: RunFolder, clock: Clock, observer: Observer
) -> Summary | None:
    """Report a resumed run that has no step and no evaluation left, without its model, and return its outcome; None if
    something is left to do."""
    config = work.config
    with Journal(folder.journal, clock) as journal:
        over = journal.step >= work.steps or plateau_reached(config.eval, journal)
        due = config.eval.after or evaluation_is_due(config.eval, journal.step)
        evaluated = journal.was_evaluated(journal.step) or not (due and work.has_held_out)
        if folder.ended.get("status") != "done" or not (over and evaluated):
            return None
        if resolved is not None:
            folder.write_config(dump(resolved, folder.config))
        observer.started(work.info(None, folder.path, journal.step))
        for note in start_notes(journal, config, work.steps):
            observer.warning(note)
        prune_checkpoints(folder, config.checkpoint)
        Timeline(folder.timeline, observer.warning).close()
        facts = work.facts(journal)
        ending = Ending(status="done")
        summary = summarise_run(config, facts, folder, journal, observer, ending, folder.elapsed())
        folder.write_summary(asdict(summary))
        observer.finished(asdict(summary))
    return summary


def restore_data(source: PromptSource | StoredRollouts, checkpoint: Checkpoint, journal: Journal) -> Pending:
    """Restore the data cursor; returns the groups and prompts that the collector held for later steps, which are
    generating or scored again in the journal."""
    facts = checkpoint.facts
    source.load(facts["cursor"])
    groups = read_groups(checkpoint.path / CARRIED_GROUPS)
    if isinstance(source, PromptSource):
        in_flight = source.prompts_for(facts.get("in_flight", []))
    else:
        in_flight = []
    pending = Pending.of(facts, groups, in_flight)
    prompts = [*(group.prompt for group in groups), *in_flight]
    journal.enqueue([p for p in prompts if journal.state_of(p.uid) is None], size=len(source.rows))  # lost ones
    journal.generating(prompt.uid for prompt in prompts)  # the rewind has queued them
    journal.scored(group for group in groups if group.prompt.uid not in pending.unjudged)
    return pending
