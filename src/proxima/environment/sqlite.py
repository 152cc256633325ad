"""A database as a tool: read-only SQL."""

import sqlite3
import time
from functools import lru_cache
from pathlib import Path

from proxima.data import FieldError, require
from proxima.environment.protocol import Environment

ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
PRAGMAS = ("table_info", "table_list")
REFUSED = ("load_extension", "random", "randomblob")  # a replayed episode must take the same course
LONGEST_CELL, LARGEST_VALUE = 200, 1 << 20  # characters shown of a cell; maximum bytes of a value


class Sqlite(Environment):
    """A tool `query`, which reads a database. All episodes of a worker share it.

    Args:
        script: a file of SQL statements that create the database, in memory.
        file: a database; either this or `script`.
        rows: maximum number of result rows shown to the model.
        seconds: time limit of a query.
    """

    def __init__(
        self, script: str | None = None, file: str | None = None, rows: int = 20, seconds: float = 2.0
    ) -> None:
        named = "file" if script is None else "script"
        remedy = "name a file of SQL statements, or a database"
        require(
            (script is None) != (file is None), named, file, "must be given, or script: one of the two", remedy=remedy
        )
        require(rows >= 1, "rows", rows, "must be >= 1")
        require(seconds > 0, "seconds", seconds, "must be > 0")
        path = script or file or ""
        require(Path(path).is_file(), named, path, "does not exist")
        self.rows, self.seconds = rows, seconds
        try:
            self.database = open_database(str(Path(path).resolve()), script is not None)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise FieldError(named, path, f"can't be read as a database: {error}", remedy=remedy) from error

    def query(self, sql: str) -> str:
        """Run a SELECT on the database. Its tables are in sqlite_master.

        Args:
            sql: one statement
        """
        deadline = time.monotonic() + self.seconds
        self.database.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            cursor = self.database.execute(sql)
            names, rows = [column[0] for column in cursor.description or ()], cursor.fetchmany(self.rows + 1)
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
            late = isinstance(error, sqlite3.OperationalError) and time.monotonic() > deadline
            raise ValueError(f"the query was ended after {self.seconds:g} s" if late else str(error)) from None
        lines = [" | ".join(_shown(value) for value in row) for row in [names, *rows[: self.rows]]]
        return "\n".join([*lines, *["(more rows)"] * (len(rows) > self.rows), *["(no rows)"] * (not rows)])


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    text = "NULL" if value is None else str(value)
    return text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + "..."


@lru_cache(maxsize=8)
def open_database(path: str, script: bool) -> sqlite3.Connection:
    """Open a read-only connection."""
    if script:
        database = sqlite3.connect(":memory:", check_same_thread=False)
        database.executescript(Path(path).read_text(encoding="utf-8"))
    else:
        database = sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True, check_same_thread=False)
        database.execute("SELECT count(*) FROM sqlite_master")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
    database.text_factory = lambda data: data.decode(errors="replace")
    database.set_authorizer(_authorize)
    return database


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    function = action == sqlite3.SQLITE_FUNCTION and second not in REFUSED
    allowed = action in ALLOWED or function or (action == sqlite3.SQLITE_PRAGMA and first in PRAGMAS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY
