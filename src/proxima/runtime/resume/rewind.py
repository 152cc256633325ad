"""Rewinds a run to its last intact checkpoint: journal, metrics.jsonl, timeline, and the files of later steps."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from proxima.data import UserError
from proxima.data.json_reader import load_json
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import MOVE_AWAY, Journal
from proxima.runtime.watch.observer import Observer
from proxima.runtime.watch.timeline import rewind_timeline
from proxima.system.atomic_files import write_atomic
from proxima.system.jsonl import dumps
from proxima.training.checkpoint import Checkpoint, last_complete


class RestoredJournal(Journal):
    """The journal of a run that is resumed: it can go back to an earlier step."""

    def rewind(self, step: int) -> None:
        """Restore the journal as it was right after `step`, 0: at the start.

        Every resume calls it with the step of its checkpoint. Later steps are deleted, and so are prompts admitted
        after `step`: the cursor draws them again. A prompt admitted before and not consumed by then (a group carried
        over) is queued again, because the cursor is past it.
        """
        kept = "uid, epoch, state, admitted_after, attempts, admitted_at"
        with self._transaction():
            self._db.execute("DELETE FROM prompts WHERE admitted_after >= ?", (step,))
            unfinished = "FROM prompts WHERE state != 'consumed' OR step > ?"
            rows = self._db.execute(f"SELECT {kept} {unfinished}", (step,)).fetchall()
            self._db.execute(f"DELETE {unfinished}", (step,))
            queued = [(uid, epoch, "queued", *rest) for uid, epoch, _, *rest in rows]
            self._db.executemany(f"INSERT INTO prompts ({kept}) VALUES (?, ?, ?, ?, ?, ?)", queued)
            self._db.execute("DELETE FROM steps WHERE step > ?", (step,))
            later = "step > ? OR (? = 0 AND step = 0)"  # at step 0 the evaluation before the first step too
            self._db.execute(f"DELETE FROM checksums WHERE {later}", (step, step))

    def restore_steps(self, records: Iterable[Mapping[str, Any]], cursor_state: object) -> None:
        """Append finished steps whose rows were lost, from their metrics; delete prompts that were not consumed."""
        with self._transaction():
            self._db.execute("DELETE FROM prompts WHERE state != 'consumed'")
            for record in records:
                row = (record["step"], record["policy_version"], dumps(cursor_state), dumps(record), self._clock.wall())
                self._db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", row)
                self.checksums.record_step(record["step"])


def check_journal(journal: RestoredJournal) -> None:
    """Refuse a journal whose content is not what was written: it decides what is trained next.

    Raises:
        UserError: names the parts, and the remedy.
    """
    damaged = journal.damage()
    if damaged:
        parts = ", ".join(damaged[:3])
        if len(damaged) > 3:
            parts = f"{parts} and {len(damaged) - 3} more"
        raise UserError(f"{journal.path} is damaged ({parts}): its content is not what was written", remedy=MOVE_AWAY)


def rewind_run(folder: RunFolder, journal: RestoredJournal, observer: Observer) -> Checkpoint | None:
    """Restore journal and records as they were at the last whole checkpoint, which is returned, or at the start."""
    checkpoint = last_complete(folder.checkpoints, observer.warning)
    step = checkpoint.step if checkpoint else 0
    if checkpoint and journal.step < step:
        _restore_steps(journal, folder, checkpoint, observer)
    last = journal.step
    journal.rewind(step)
    changes = journal.get("changes") or ()
    journal.set("changes", [entry | {"step": min(entry["step"], step)} for entry in changes])
    steps = list(reversed(list(journal.history())))
    evaluations = rewind_folder(folder, step, steps, journal.get("evaluations") or ())
    journal.set("evaluations", evaluations)
    if step < last:
        place = "the start, because no checkpoint exists"
        if checkpoint:
            place = f"the checkpoint of step {step}"
        repeated = "1 finished step is" if last - step == 1 else f"{last - step} finished steps are"
        observer.warning(f"resuming from {place}: {repeated} repeated; see checkpoint.every")
    return checkpoint


def _restore_steps(journal: RestoredJournal, folder: RunFolder, checkpoint: Checkpoint, observer: Observer) -> None:
    """If the journal ends before the checkpoint, restore the steps between from metrics.jsonl."""
    first = journal.step + 1
    last = checkpoint.step
    records = {r["step"]: r for r in folder.read_metrics() if r["kind"] == "train"}
    lost = [step for step in range(first, last + 1) if step not in records]
    if lost:
        raise UserError(
            f"{journal.path} ends at step {first - 1}, metrics.jsonl lacks step {lost[0]}, and {checkpoint.path} is of "
            f"step {last}",
            remedy="restore run.sqlite together with run.sqlite-wal, or delete the checkpoints after the journal's end",
        )
    journal.restore_steps([records[step] for step in range(first, last + 1)], checkpoint.facts["cursor"])
    observer.warning(
        f"run.sqlite ended at step {first - 1}: was it copied without run.sqlite-wal? Steps {first} to {last} are "
        "restored from metrics.jsonl; only rollouts/ has what became of their prompts"
    )


def rewind_folder(
    folder: RunFolder, step: int, steps: Sequence[Mapping[str, Any]] = (), evaluations: Sequence[Mapping[str, Any]] = ()
) -> list[Mapping[str, Any]]:
    """Restore the records as they were right after `step`: write metrics.jsonl again, delete later Parquet files, the
    timeline after the last record, and summary and report unless the run ended there. Checkpoints and log.txt stay.

    Step 0 is the run before anything happened: the evaluation before the first step is deleted too. `steps` and
    `evaluations` are the journal's records; metrics.jsonl may lack any of them.

    Returns: the evaluations that are left.
    """

    def stays(of_step: int) -> bool:
        return step > 0 and of_step <= step

    folder.ended = {}
    with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged one is worth nothing
        ended = load_json(folder.summary.read_text(encoding="utf-8"))
        ended["seconds"] = float(ended["seconds"])
        if 0 < step == ended["steps"]:
            folder.ended = ended
        earlier = [warning for warning in ended.get("warnings", ()) if stays(warning["step"])]
        folder.earlier_warnings = [{**warning, "last": min(warning.get("last", step), step)} for warning in earlier]
    written = [record for record in folder.read_metrics() if record["kind"] == "eval"]
    by_step = {record["step"]: record for record in (*written, *evaluations) if stays(record["step"])}
    evals = list(by_step.values())
    records = sorted((*steps, *evals), key=_place)
    lines = [f"{dumps(record)}\n" for record in records]
    write_atomic(folder.metrics, "".join(lines))
    rewind_timeline(folder.timeline, folder.elapsed())
    for place in (folder.rollouts, folder.evals):
        for file in place.glob("*.parquet"):
            number = file.stem.partition("-")[0]
            if number.isdecimal() and not stays(int(number)):
                file.unlink()
    if not folder.ended:  # else they are still true, until the run goes on
        folder.remove_outcome()
    return evals


def _place(record: Mapping[str, Any]) -> tuple[int, bool]:
    """A step comes before its evaluation."""
    return record["step"], record["kind"] == "eval"
