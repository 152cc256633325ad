"""What a resume does before the loop: it restores the run as of its last checkpoint, or reports one that has ended."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from proxima.config.resolved import Resolved
from proxima.config.yaml_dump import dump
from proxima.runtime.launch.inputs import check_inputs, start_notes
from proxima.runtime.loop.training_loop import evaluation_is_due, plateau_reached
from proxima.runtime.state.best_checkpoint import prune_checkpoints
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.restored_journal import RestoredJournal
from proxima.runtime.state.resume import Change, check_resume
from proxima.runtime.state.rewind import check_journal, record_changes, rewind_run
from proxima.runtime.state.summary import Summary, summarise_run
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.observer import Observer
from proxima.runtime.watch.timeline import Timeline
from proxima.training.checkpoint import Checkpoint


def rewound(
    work: Any, hashes: Callable[[], dict[str, str]], folder: RunFolder, clock: Clock, observer: Observer, accept: bool
) -> Checkpoint | None:
    """Restore everything but weights and optimizer to its state at the last checkpoint, which is returned."""
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
    work: Any, resolved: Resolved[Any] | None, folder: RunFolder, clock: Clock, observer: Observer
) -> Summary | None:
    """Report a resumed run that has no step and no evaluation left, without its model, and return its outcome; None if
    something is left to do."""
    config = work.config
    with Journal(folder.journal, clock) as journal:
        over = journal.step >= work.steps or plateau_reached(config.eval, journal)
        due = config.eval.after or evaluation_is_due(config.eval, journal.step)
        evaluated = journal.was_evaluated(journal.step) or not (due and work.data.held_out)
        if folder.ended.get("status") != "done" or not (over and evaluated):
            return None
        if resolved is not None:
            folder.write_config(dump(resolved, folder.config))
        observer.started(work.info(None, folder.path, journal.step))
        for note in start_notes(journal, work):
            observer.warning(note)
        prune_checkpoints(folder, config.checkpoint)
        Timeline(folder.timeline, observer.warning).close()
        summary = summarise_run(work, folder, journal, observer, ("done", folder.elapsed(), None, True))
        folder.write_summary(asdict(summary))
        observer.finished(asdict(summary))
    return summary
