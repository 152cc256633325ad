"""What must survive the process: sessions, models, samplers, checkpoints, and every request that changes a model.

A request is written, and on the disk, before its client is told that it was accepted. A model's state is written to a
file from time to time; after a restart, the requests since then are run again from it, which gives the same bits. So
nothing that was accepted is lost, and nothing is done twice.
"""

import json
import sqlite3
import threading
from pathlib import Path
from typing import Any, NamedTuple

from proxima.data import UserError
from proxima.data.json_reader import load_json

VERSION = 2
SCHEMA = """
CREATE TABLE IF NOT EXISTS records (kind TEXT, id TEXT, value TEXT NOT NULL, PRIMARY KEY (kind, id));
CREATE TABLE IF NOT EXISTS requests (
    model TEXT, seq INTEGER, kind TEXT NOT NULL, body BLOB, answer BLOB, media TEXT, PRIMARY KEY (model, seq)
) WITHOUT ROWID;
"""
ANSWERS_KEPT = 256  # of each model
Answer = tuple[bytes, str]  # content and media type


class StoredRequest(NamedTuple):
    """A request of a model: `body` until its effect is in the state on disk; `answer` once it is done."""

    kind: str
    body: bytes | None
    answer: Answer | None


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
            for name, value in {"version": str(VERSION), "model": model}.items():
                if (kept := self.get("server", name) or value) != value:
                    raise UserError(f"{path.parent} is of {name} {kept}, not {value}", remedy="choose another --folder")
                self.put("server", name, value)
        except sqlite3.Error as error:  # also of a file with other tables
            raise UserError(f"{path} can't be opened: {error}", remedy="choose another --folder") from error

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def put(self, kind: str, id: str, value: Any) -> None:
        """Write or replace a record, a JSON value."""
        sql = "INSERT INTO records VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
        self._rows(sql, kind, id, json.dumps(value))

    def get(self, kind: str, id: str) -> Any:
        """A record, or None."""
        rows = self._rows("SELECT value FROM records WHERE kind = ? AND id = ?", kind, id)
        return load_json(rows[0][0]) if rows else None

    def delete(self, kind: str, id: str) -> None:
        self._rows("DELETE FROM records WHERE kind = ? AND id = ?", kind, id)

    def all(self, kind: str, begins: str = "") -> list[tuple[str, Any]]:
        """The records of a kind whose ids begin with `begins`, in the order of their creation: id, value."""
        sql = "SELECT id, value FROM records WHERE kind = ? AND id >= ? AND id < ? ORDER BY rowid"
        return [(id, load_json(value)) for id, value in self._rows(sql, kind, begins, begins + "\U0010ffff")]

    def accept(self, model: str, seq: int, kind: str, body: bytes) -> bool:
        """Write a request; False if there is one of this number already."""
        sql = "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, NULL, NULL) RETURNING seq"
        return bool(self._rows(sql, model, seq, kind, body))

    def finish(self, model: str, seq: int, answer: Answer | None, record: Any = None) -> None:
        """Write the answer of a request. `record`: of its model, whose state on disk now has the effects of the
        requests up to this one: their bodies are forgotten, and old answers that an earlier state had."""
        with self._lock, self._db:  # all or nothing
            self._db.execute("BEGIN IMMEDIATE")
            if answer is not None:
                answered = "UPDATE requests SET answer = ?, media = ? WHERE model = ? AND seq = ?"
                self._db.execute(answered, (*answer, model, seq))
            if record is not None:
                sql = "UPDATE records SET value = ? WHERE kind = 'model' AND id = ?"
                self._db.execute(sql, (json.dumps(record), model))
                over = "DELETE FROM requests WHERE body IS NULL AND model = ? AND seq <= ?"
                self._db.execute(over, (model, seq - ANSWERS_KEPT))
                self._db.execute("UPDATE requests SET body = NULL WHERE model = ? AND seq <= ?", (model, seq))

    def pending(self, model: str, after: int) -> dict[int, int]:
        """The requests of a model after a number, whose effects are not in its state: bytes by number."""
        return dict(self._rows("SELECT seq, length(body) FROM requests WHERE model = ? AND seq > ?", model, after))

    def request(self, model: str, seq: int) -> StoredRequest | None:
        """A request, or None."""
        rows = self._rows("SELECT kind, body, answer, media FROM requests WHERE model = ? AND seq = ?", model, seq)
        if not rows:
            return None
        kind, body, answer, media = rows[0]
        return StoredRequest(kind, body, None if answer is None else (answer, media))

    def close(self) -> None:
        with self._lock:
            self._db.close()
