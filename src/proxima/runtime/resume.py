"""A resume: what would make it another run is refused, and everything is restored as it was at the last checkpoint."""

from typing import Any

from proxima.config.comparable import ABSENT, Purpose, compared, differences, flat_values
from proxima.data import FieldError, UserError
from proxima.runtime.folder import RunFolder
from proxima.runtime.journal import Journal
from proxima.runtime.observer import Observer
from proxima.train.checkpoint import Checkpoint, last_whole


def rewind_run(folder: RunFolder, journal: Journal, observer: Observer) -> Checkpoint | None:
    """Restore journal and records as they were at the last whole checkpoint, which is returned, or at the start."""
    checkpoint = last_whole(folder.checkpoints, observer.warning)
    step = checkpoint.step if checkpoint else 0
    if checkpoint and journal.step < step:
        _restore_steps(journal, folder, checkpoint, observer)
    last = journal.step
    journal.rewind(step)
    steps = [journal.metrics(number) or {} for number in range(1, step + 1)]
    journal.set("evaluations", folder.rewind(step, steps, journal.get("evaluations") or ()))
    if step < last:
        place = f"the checkpoint of step {step}" if checkpoint else "the start, because no checkpoint exists"
        observer.warning(f"resuming from {place}: {last - step} finished steps are repeated; see checkpoint.every")
    return checkpoint


def _restore_steps(journal: Journal, folder: RunFolder, checkpoint: Checkpoint, observer: Observer) -> None:
    """Into a journal that ends before the checkpoint, the steps between, from metrics.jsonl."""
    first, last = journal.step + 1, checkpoint.step
    records = {r["step"]: r for r in folder.read_metrics() if r["kind"] == "train"}
    if lost := [step for step in range(first, last + 1) if step not in records]:
        raise UserError(
            f"{journal.path} ends at step {first - 1}, metrics.jsonl lacks step {lost[0]}, and {checkpoint.path} is of "
            f"step {last}",
            remedy="restore run.sqlite together with run.sqlite-wal, or delete the checkpoints after the journal's end",
        )
    journal.restore_steps([records[step] for step in range(first, last + 1)], checkpoint.facts["cursor"])
    observer.warning(
        f"run.sqlite ended at step {first - 1}: was it copied without run.sqlite-wal? Steps {first} to {last} are "
        "restored from metrics.jsonl; what became of their prompts is in rollouts/ alone"
    )


def check_resume(journal: Journal, config: Any) -> None:
    """Record the config in a new journal; refuse a resume whose config differs in a field that may not.

    Raises:
        FieldError: names the first field that differs, both values, and the remedy.
    """
    now = compared(flat_values(config), Purpose.RESUME)
    before = journal.get("config")
    if before is None:
        journal.set("config", now)
        return
    for path, was, wanted in differences(before, now, Purpose.RESUME):
        shown = "a config without it" if was is ABSENT else repr(was)
        reason = f"differs from {shown}, with which the run in {journal.path.parent} was started"
        remedy = "resume with that value, or start another run with folder=PATH"
        raise FieldError(path, None if wanted is ABSENT else wanted, reason, remedy=remedy)


def schedule_note(journal: Journal, schedule: str, now: int) -> str | None:
    """A warning if `now` is another number of steps than at the start, which changes the learning rate schedule in the
    middle of the run."""
    started = journal.get("steps")
    if started is None:
        journal.set("steps", now)
        return None
    if started == now or schedule == "constant":
        return None
    return (
        f"train.steps={now}, and the run was started with {started}: from here on the {schedule} learning "
        f"rate falls towards step {now}, unlike in a run of {now} steps from the start; train.schedule=constant avoids "
        "the difference"
    )
