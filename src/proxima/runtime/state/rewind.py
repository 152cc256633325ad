"""Journal, records and files of a run as they were at its last whole checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from proxima.data import UserError
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.watch.observer import Observer
from proxima.train.checkpoint import Checkpoint
from proxima.train.checkpoint_restore import last_complete

MOVE_AWAY = "move it away, and a resume restores the steps up to the last checkpoint from metrics.jsonl"


def rewind_run(folder: RunFolder, journal: Journal, observer: Observer) -> Checkpoint | None:
    """Restore journal and records as they were at the last whole checkpoint, which is returned, or at the start."""
    checkpoint = last_complete(folder.checkpoints, observer.warning)
    step = checkpoint.step if checkpoint else 0
    if checkpoint and journal.step < step:
        _restore_steps(journal, folder, checkpoint, observer)
    last = journal.step
    journal.rewind(step)
    journal.set("changes", [entry | {"step": min(entry["step"], step)} for entry in journal.get("changes") or ()])
    steps = [journal.metrics(number) or {} for number in range(1, step + 1)]
    evaluations = journal.get("evaluations") or ()
    for damage in (*metrics_damage(folder, [*steps, *evaluations], up_to=step), *files_damage(folder, journal)):
        observer.warning(damage)
    journal.set("evaluations", folder.rewind(step, steps, evaluations))
    if step < last:
        place = f"the checkpoint of step {step}" if checkpoint else "the start, because no checkpoint exists"
        repeated = "1 finished step is" if last - step == 1 else f"{last - step} finished steps are"
        observer.warning(f"resuming from {place}: {repeated} repeated; see checkpoint.every")
    return checkpoint


def _restore_steps(journal: Journal, folder: RunFolder, checkpoint: Checkpoint, observer: Observer) -> None:
    """If the journal ends before the checkpoint, restore the steps between from metrics.jsonl."""
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


def check_journal(journal: Journal) -> None:
    """Refuse a journal whose content is not what was written: it decides what is trained next.

    Raises:
        UserError: names the parts, and the remedy.
    """
    if damage := journal.checksums.damage():
        parts = ", ".join(damage[:3]) + (f" and {len(damage) - 3} more" if len(damage) > 3 else "")
        raise UserError(f"{journal.path} is damaged ({parts}): its content is not what was written", remedy=MOVE_AWAY)


def metrics_damage(folder: RunFolder, records: Sequence[Mapping[str, Any]], *, up_to: int) -> list[str]:
    """A warning if metrics.jsonl differs from the journal's records; a resume writes it again."""
    expected = {(r["kind"], r["step"]): r for r in records}
    lines = [(r.get("kind"), r.get("step"), r) for r in folder.read_metrics()]
    wrong = [step for kind, step, r in lines if expected.get((kind, step), r) != r]
    wrong += [step for kind, step, _ in lines if kind not in ("train", "eval") or not isinstance(step, int)]
    if not wrong:
        return []
    return [f"{folder.metrics}: the record of step {wrong[0]} was damaged; it is restored from run.sqlite"]


def files_damage(folder: RunFolder, journal: Journal) -> list[str]:
    """A warning if a finished file is missing or has another size; their content is what `proxima check` reads."""
    wrong = []
    for name, checksum in journal.checksums.read().items():
        if name.startswith(("rollouts/", "evals/")):
            place = folder.path / name
            if not place.is_file():
                wrong.append(f"{name} is missing")
            elif place.stat().st_size != checksum.size:
                wrong.append(f"{name} is damaged")
    if not wrong:
        return []
    more = f", and {len(wrong) - 1} other files" if len(wrong) > 1 else ""
    return [f"{wrong[0]}{more}: this run continues without, a replay can't; see proxima check {folder.path}"]
