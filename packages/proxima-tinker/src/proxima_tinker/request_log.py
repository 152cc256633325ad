"""What must survive the process: sessions, models, samplers, checkpoints, and every request that changes a model.

A request is written, and on the disk, before its client is told that it was accepted. A model's state is written to a
file from time to time; after a restart, the requests since then are run again from it, which gives the same bits. So
nothing that was accepted is lost, and nothing is done twice. Every row has a checksum, which is compared when it is
read.
"""

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from proxima.data import UserError
from proxima.data.json_reader import load_json
from proxima.system.damage import Checksum
from proxima.system.full_disk import sqlite_disk_full

VERSION = 3
SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    kind TEXT, id TEXT, value TEXT NOT NULL, crc32 TEXT NOT NULL, PRIMARY KEY (kind, id)
);
CREATE TABLE IF NOT EXISTS requests (
    model TEXT, seq INTEGER, kind TEXT NOT NULL, body BLOB, crc32 TEXT NOT NULL,
    answer BLOB, media TEXT, answer_crc32 TEXT, PRIMARY KEY (model, seq)
) WITHOUT ROWID;
"""
MOST_WAITING = 1024  # requests of a model that may wait, and its last answers that are kept: those of all that waited
Answer = tuple[bytes, str]  # content and media type


class StoredRequest(NamedTuple):
    """A request of a model: `body` until its effect is in the state on disk; `answer` once it is done, unless that is
    damaged."""

    kind: str
    body: bytes | None
    answer: Answer | None


def recorded_model(path: Path) -> str | None:
    """The model that the file at `path` was written for; None if there is no such file, or it can't be read, which
    `RequestLog` reports."""
    if not path.is_file():
        return None
    try:
        with closing(sqlite3.connect(path)) as db:
            row = db.execute("SELECT value FROM records WHERE kind = 'server' AND id = 'model'").fetchone()
        return None if row is None else str(load_json(row[0]))
    except (sqlite3.Error, ValueError):
        return None


class RequestLog:
    """The SQLite file of a server; safe to call from any thread.

    Every method raises OSError where the disk is full, and then has changed nothing; and UserError where the file is
    damaged.

    Raises:
        UserError: the file was written for another model, or by another version, or is damaged.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.text_factory = lambda text: text.decode(errors="replace")  # of a damaged file, the checksums tell
            damage = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise sqlite3.DatabaseError(" ".join(damage.split()))
            self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;" + SCHEMA)
            for name, value in {"version": str(VERSION), "model": model}.items():
                rows = self._rows("SELECT value FROM records WHERE kind = 'server' AND id = ?", name)
                kept = load_json(rows[0][0]) if rows else value
                if kept != value:
                    raise UserError(f"{path.parent} is of {name} {kept}, not {value}", remedy="choose another --folder")
                self.put("server", name, value)
        except (sqlite3.Error, ValueError) as error:  # also of a file with other tables
            raise UserError(f"{path} can't be opened: {error}", remedy="choose another --folder") from error

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, self._failures_named():
            return self._db.execute(sql, values).fetchall()

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            full = sqlite_disk_full(error, self.path)
            if full:
                raise full from error
            raise
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self.path} is damaged: {what}", remedy="restore it from a copy, or choose another --folder")

    def put(self, kind: str, id: str, value: Any) -> None:
        """Write or replace a record, a JSON value."""
        sql = "INSERT INTO records VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value, "
        text = json.dumps(value)
        self._rows(f"{sql} crc32 = excluded.crc32", kind, id, text, _sum(kind, id, text))

    def get(self, kind: str, id: str) -> Any:
        """A record, or None."""
        rows = self._rows("SELECT value, crc32 FROM records WHERE kind = ? AND id = ?", kind, id)
        return self._record(kind, id, *rows[0]) if rows else None

    def _record(self, kind: str, id: str, text: str, crc32: str) -> Any:
        if _sum(kind, id, text) != crc32:
            raise self._damaged(f"the record of {kind} {id} differs from what was written")
        return load_json(text)

    def delete(self, kind: str, id: str) -> None:
        self._rows("DELETE FROM records WHERE kind = ? AND id = ?", kind, id)

    def all(self, kind: str, begins: str = "") -> list[tuple[str, Any]]:
        """The records of a kind whose ids begin with `begins`, in the order of their creation: id, value."""
        sql = "SELECT id, value, crc32 FROM records WHERE kind = ? AND id >= ? AND id < ? ORDER BY rowid"
        return [(id, self._record(kind, id, *row)) for id, *row in self._rows(sql, kind, begins, begins + "\U0010ffff")]

    def accept(self, model: str, seq: int, kind: str, body: bytes) -> bool:
        """Write a request; False if there is one of this number already."""
        sql = "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?, NULL, NULL, NULL) RETURNING seq"
        return bool(self._rows(sql, model, seq, kind, body, _sum(model, seq, kind, body)))

    def finish(self, model: str, seq: int, answer: Answer | None, record: Any = None, *, changed: bool = True) -> None:
        """Write the answer of a request, and forget what nobody needs any more: bodies that need not run again, and
        their answers but for the last `MOST_WAITING`.

        Args:
            record: of its model, whose state on disk now has the effects of the requests up to this one.
            changed: the request had an effect on the model; else it does not run again.
        """
        with self._lock, self._failures_named(), self._db:  # all or nothing
            self._db.execute("BEGIN IMMEDIATE")
            if answer is not None:
                answered = "UPDATE requests SET answer = ?, media = ?, answer_crc32 = ? WHERE model = ? AND seq = ?"
                self._db.execute(answered, (*answer, _sum(model, seq, *answer), model, seq))
            if record is not None:
                sql = "UPDATE records SET value = ?, crc32 = ? WHERE kind = 'model' AND id = ?"
                text = json.dumps(record)
                self._db.execute(sql, (text, _sum("model", model, text), model))
                self._db.execute("UPDATE requests SET body = NULL WHERE model = ? AND seq <= ?", (model, seq))
            elif not changed:
                self._db.execute("UPDATE requests SET body = NULL WHERE model = ? AND seq = ?", (model, seq))
            if record is not None or not changed:
                over = "DELETE FROM requests WHERE body IS NULL AND model = ? AND seq <= ?"
                self._db.execute(over, (model, seq - MOST_WAITING))

    def pending(self, model: str, after: int) -> dict[int, int]:
        """The requests of a model after a number that have to run, for the first time or again: bytes by number."""
        sql = "SELECT seq, length(body) FROM requests WHERE model = ? AND seq > ? AND body IS NOT NULL"
        return dict(self._rows(sql, model, after))

    def last_answered(self, model: str) -> int:
        """The number of the last request of a model that was answered; -1: none."""
        rows = self._rows("SELECT max(seq) FROM requests WHERE model = ? AND answer IS NOT NULL", model)
        last = rows[0][0]
        return -1 if last is None else int(last)

    def request(self, model: str, seq: int) -> StoredRequest | None:
        """A request, or None. A damaged answer counts as none: a request with a body can run again.

        Raises:
            UserError: its kind or its body is damaged.
        """
        rows = self._rows("SELECT kind, body, crc32 FROM requests WHERE model = ? AND seq = ?", model, seq)
        if not rows:
            return None
        kind, body, crc32 = rows[0]
        if body is not None and _sum(model, seq, kind, body) != crc32:
            raise self._damaged(f"request {seq} of {model} differs from what was written")
        try:
            return StoredRequest(kind, body, self.answer(model, seq))
        except UserError:
            return StoredRequest(kind, body, None)

    def answer(self, model: str, seq: int) -> Answer | None:
        """The answer of a request; None until it is done.

        Raises:
            KeyError: there is no such request.
            UserError: the answer is damaged.
        """
        rows = self._rows("SELECT answer, media, answer_crc32 FROM requests WHERE model = ? AND seq = ?", model, seq)
        if not rows:
            raise KeyError(seq)
        answer, media, crc32 = rows[0]
        if rows[0] == (None, None, None):
            return None
        if _sum(model, seq, answer, media) != crc32:
            raise self._damaged(f"answer {seq} of {model} differs from what was written")
        return answer, media

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _sum(*values: str | int | bytes) -> str:
    """The CRC-32 of the values of a row."""
    parts = []
    for value in values:
        if not isinstance(value, bytes):
            value = str(value).encode(errors="replace")
        parts.append(value)
    return Checksum.of_bytes(b"\0".join(parts)).crc32
