"""What must survive the process: sessions, models, samplers, checkpoints, and every request that changes a model.

A request is written, and on the disk, before its client is told that it was accepted. A model's state is written to a
file from time to time; after a restart, the requests since then are run again from it, which gives the same bits. So
nothing that was accepted is lost, and nothing is done twice.
"""

import json
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from proxima.data import UserError

VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (
    kind TEXT, id TEXT, created REAL NOT NULL, value TEXT NOT NULL, PRIMARY KEY (kind, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (
    model TEXT, seq INTEGER, kind TEXT NOT NULL, body BLOB, answer BLOB, media TEXT, created REAL NOT NULL,
    PRIMARY KEY (model, seq)
) WITHOUT ROWID;
"""


class StoredRequest(NamedTuple):
    """A request of a model: `body` until its effect is in the state on disk; `answer` and its media type once it is
    done."""

    kind: str
    body: bytes | None
    answer: bytes | None
    media: str | None


class RequestLog:
    """The SQLite file of a server; safe to call from any thread.

    Raises:
        UserError: the file was written for another model, or by a later version, or is damaged.
    """

    def __init__(self, path: Path, model: str) -> None:
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;" + SCHEMA)
        except sqlite3.Error as error:
            raise UserError(f"{path} can't be opened: {error}", remedy="choose another --folder") from error
        for name, value in {"version": str(VERSION), "model": model}.items():
            self._db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, value))
            (kept,) = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
            if kept != value:
                raise UserError(f"{path.parent} is of {name} {kept}, not {value}", remedy="choose another --folder")

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def put(self, kind: str, id: str, value: Any) -> None:
        """Write or replace a record, a JSON value; the time of its creation stays."""
        sql = "INSERT INTO records VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
        self._rows(sql, kind, id, time.time(), json.dumps(value))

    def get(self, kind: str, id: str) -> Any:
        """A record, or None."""
        rows = self._rows("SELECT value FROM records WHERE kind = ? AND id = ?", kind, id)
        return json.loads(rows[0][0]) if rows else None

    def delete(self, kind: str, id: str) -> None:
        self._rows("DELETE FROM records WHERE kind = ? AND id = ?", kind, id)

    def all(self, kind: str) -> list[tuple[str, Any]]:
        """The records of a kind, in the order of their creation: id, value."""
        rows = self._rows("SELECT id, value FROM records WHERE kind = ? ORDER BY created, id", kind)
        return [(id, json.loads(value)) for id, value in rows]

    def accept(self, model: str, seq: int, kind: str, body: bytes) -> bool:
        """Write a request; False if there is one of this number already."""
        sql = "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, NULL, NULL, ?) RETURNING seq"
        return bool(self._rows(sql, model, seq, kind, body, time.time()))

    def finish(self, model: str, seq: int, answer: bytes, media: str, *, never: bool = False) -> None:
        """Write the answer of a request; `never`: it was not run, and must not be after a restart."""
        sql = "UPDATE requests SET answer = ?, media = ?, body = iif(?, NULL, body) WHERE model = ? AND seq = ?"
        self._rows(sql, answer, media, never, model, seq)

    def kept_until(self, model: str, seq: int, value: Any, answers: int, last: tuple[bytes, str] | None = None) -> None:
        """The state of a model on disk now has the effects of its requests up to `seq`, whose answer is `last`: write
        its record, and forget the bodies of these requests and all but their last `answers`."""
        with self._lock, self._db:  # all or nothing
            self._db.execute("BEGIN IMMEDIATE")
            if last is not None:
                answered = "UPDATE requests SET answer = ?, media = ? WHERE model = ? AND seq = ? AND answer IS NULL"
                self._db.execute(answered, (*last, model, seq))
            sql = "UPDATE records SET value = ? WHERE kind = 'model' AND id = ?"
            self._db.execute(sql, (json.dumps(value), model))
            self._db.execute("UPDATE requests SET body = NULL WHERE model = ? AND seq <= ?", (model, seq))
            self._db.execute("DELETE FROM requests WHERE model = ? AND seq <= ?", (model, seq - answers))

    def pending(self, model: str, after: int) -> dict[int, int]:
        """The requests of a model after a number whose effects are not in its state: bytes by number."""
        sql = "SELECT seq, length(body) FROM requests WHERE model = ? AND seq > ? AND body IS NOT NULL ORDER BY seq"
        return dict(self._rows(sql, model, after))

    def answered(self, model: str) -> int:
        """The last request of a model that has an answer; -1 if none has."""
        sql = "SELECT coalesce(max(seq), -1) FROM requests WHERE model = ? AND answer IS NOT NULL"
        return int(self._rows(sql, model)[0][0])

    def has(self, model: str, seq: int) -> bool:
        """True if there is such a request."""
        return bool(self._rows("SELECT 1 FROM requests WHERE model = ? AND seq = ?", model, seq))

    def request(self, model: str, seq: int) -> StoredRequest | None:
        """A request, or None."""
        rows = self._rows("SELECT kind, body, answer, media FROM requests WHERE model = ? AND seq = ?", model, seq)
        return StoredRequest(*rows[0]) if rows else None

    def close(self) -> None:
        with self._lock:
            self._db.close()
