"""The journal of a run that was interrupted: compared with what was written, and restored to an earlier step."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from proxima.data import UserError
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.journal_checksums import PART
from proxima.system.jsonl import dumps


class RestoredJournal(Journal):
    """A `Journal` that a resume opens first."""

    def damage(self) -> list[str]:
        """The parts of the journal whose content is not what was written."""
        try:
            verdict = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if verdict != "ok":
                return [" ".join(str(verdict).split())]
            now, recorded = self.checksums.now(), self.checksums.read()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            return [" ".join(str(error).split())]
        changed = (name for name, checksum in recorded.items() if now.get(name) != checksum)
        return [name.removeprefix(PART) for name in changed if name.startswith(PART)]

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

    def restore_steps(self, records: Iterable[Mapping[str, Any]], cursor_state: Any) -> None:
        """Append finished steps whose rows were lost, from their metrics; delete prompts that were not consumed."""
        with self._transaction():
            self._db.execute("DELETE FROM prompts WHERE state != 'consumed'")
            for record in records:
                row = (record["step"], record["policy_version"], dumps(cursor_state), dumps(record), self._clock.wall())
                self._db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", row)
                self.checksums.record_step(record["step"])


@contextmanager
def copied_journal(path: Path) -> Iterator[RestoredJournal]:
    """A copy of a journal, for reading: SQLite may write beside a file that it only reads. It is empty where there is
    no journal."""
    with TemporaryDirectory() as place:
        for file in path.parent.glob(f"{path.name}*"):
            copyfile(file, Path(place, file.name))
        copy = Path(place, path.name)
        try:
            journal = RestoredJournal(copy)
        except UserError as error:
            raise UserError(error.reason.replace(str(copy), str(path)), remedy=error.remedy) from error
        with journal:
            yield journal
