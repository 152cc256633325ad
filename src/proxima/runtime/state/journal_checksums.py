"""Checksums in the journal: of the files of the run folder, and of the journal's own content.

A file's checksum is written by the transaction that ends its step or evaluation. A kill before that leaves a file of
which the journal knows nothing, and a resume writes it again; so what the journal knows is damaged if it differs.
"""

import sqlite3

from proxima.system.damage import Checksum

PART = "run.sqlite "  # begins the names of the journal's parts
WHOLE_RUN = -1


class JournalChecksums:
    """The table `checksums` of an open journal; the journal makes the transactions."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.files: dict[str, tuple[int, Checksum]] = {}  # written completely: step and checksum, for `record_files`

    def read(self) -> dict[str, Checksum]:
        """All checksums, by name."""
        rows = self._db.execute("SELECT name, size, crc32 FROM checksums").fetchall()
        return {name: Checksum(size, crc32) for name, size, crc32 in rows}

    def record_files(self) -> None:
        """Record the `files` that were written."""
        for name, (step, checksum) in self.files.items():
            self._record(name, step, checksum)

    def record_step(self, step: int) -> None:
        """Record the checksum of a finished step's rows in the journal."""
        self._record(f"{PART}step {step}", step, self._content(step))

    def record_key(self, key: str, text: str) -> None:
        """Record a value of the meta table."""
        self._record(f"{PART}{key}", WHOLE_RUN, _of_text(text))

    def _record(self, name: str, step: int, checksum: Checksum) -> None:
        row = (name, step, checksum.size, checksum.crc32)
        self._db.execute("INSERT OR REPLACE INTO checksums VALUES (?, ?, ?, ?)", row)

    def now(self) -> dict[str, Checksum]:
        """Those of all parts of the journal as it is."""
        parts = {f"{PART}{key}": _of_text(value) for key, value in self._db.execute("SELECT key, value FROM meta")}
        steps = self._db.execute("SELECT step FROM steps").fetchall()
        return parts | {f"{PART}step {step}": self._content(step) for (step,) in steps}

    def _content(self, step: int) -> Checksum:
        """The content of a finished step's row and of its prompts."""
        rows = self._db.execute("SELECT * FROM steps WHERE step = ?", (step,)).fetchall()
        query = "SELECT * FROM prompts WHERE state = 'consumed' AND step = ? ORDER BY uid"
        return _of_text(repr([*rows, *self._db.execute(query, (step,)).fetchall()]))


def _of_text(text: str) -> Checksum:
    return Checksum.of_bytes(text.encode())
