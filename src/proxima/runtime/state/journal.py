"""The journal: the state of each prompt, in a SQLite file that survives `kill -9` at any instant.

    queued → generating → scored → selected | dropped → consumed

`consume` ends a step in one transaction: its prompts become consumed, and the step, the data cursor, the policy version
and the metrics are written. So either all of a step happened or none of it. The rules are in the database itself
(checks and triggers): no code path can consume a prompt twice or skip a state.
"""

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self

from proxima.data import UserError
from proxima.data.flow import Group, Prompt
from proxima.data.json_reader import load_json
from proxima.runtime.watch.clock import Clock
from proxima.system.damage import Checksum, reading
from proxima.system.full_disk import sqlite_disk_full
from proxima.system.jsonl import dumps

RESTORED = "a resume restores the steps up to the last checkpoint from metrics.jsonl"
MOVE_AWAY = f"move it away, and {RESTORED}"
State = Literal["queued", "generating", "scored", "selected", "dropped", "consumed"]

PART = "run.sqlite "  # begins the names of the journal's parts
WHOLE_RUN = -1


class Journal:
    """The states of a run's prompts, and its steps.

    Every method that writes is one transaction, on disk when it returns (WAL, `synchronous=FULL`). Any number of
    readers (a viewer, the report) may have the file open meanwhile; the lock of the run folder keeps other writers out.

    Args:
        path: the SQLite file; created if missing.
        clock: gives the timestamps.

    Raises:
        OSError: the disk is full; from any method, which has then changed nothing.
        UserError: the file is not a journal, or has another format.
        ValueError: a transition that the states don't allow; names the prompt and its state. Nothing is changed.
    """

    def __init__(self, path: Path | str, clock: Clock | None = None) -> None:
        self.path = Path(path)
        self._clock = clock or Clock()
        self._opened = False
        try:
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=30.0, check_same_thread=False)
        except sqlite3.OperationalError as error:  # a folder, a loop of links
            raise UserError(f"{self.path} can't be read or written ({error})", remedy=MOVE_AWAY) from error
        self._db.text_factory = lambda text: text.decode(errors="replace")  # of a damaged file, the checksums tell
        self.checksums = JournalChecksums(self._db)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            damage = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise sqlite3.DatabaseError(" ".join(damage.split()))
            with self._transaction():  # if two processes open a new file at once, the second one sees the tables
                if not self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
                    for statement in STATEMENTS:
                        self._db.execute(statement)
                    self._set("format", FORMAT)
            version = self.get("format")
        except OSError:
            self._db.close()
            raise
        except (sqlite3.DatabaseError, ValueError) as error:  # also text that is no UTF-8, or no JSON
            self._db.close()
            raise self._unusable(error) from error
        if version != FORMAT:
            self._db.close()
            remedy = "resume with the version of proxima that started the run"
            raise UserError(f"{self.path}: format {version}, this version reads {FORMAT}", remedy=remedy)
        self._opened = str(path) != ":memory:"

    def _unusable(self, error: sqlite3.DatabaseError | ValueError) -> OSError | UserError:
        """What an error means that the file gives when it is opened."""
        if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
            full = sqlite_disk_full(error, self.path)
            if full:
                return full
            remedy = "check the disk, then resume with --resume"
            return UserError(f"{self.path} can't be read or written ({error})", remedy=remedy)
        return UserError(f"{self.path} is damaged, or not a journal of proxima ({error})", remedy=MOVE_AWAY)

    def close(self) -> None:
        """Release the file. The journal is safe without it."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def step(self) -> int:
        """The last finished step; 0 before the first."""
        return int(self._db.execute("SELECT COALESCE(MAX(step), 0) FROM steps").fetchone()[0])

    @property
    def version(self) -> int:
        """The policy version after the last finished step: how often new weights were published."""
        row = self._db.execute("SELECT policy_version FROM steps ORDER BY step DESC LIMIT 1").fetchone()
        if row is None:
            return 0
        return int(row[0])

    def get(self, key: str) -> Any:
        """A value of the meta table; None if it is missing. UserError if it is damaged."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        with reading(f"{self.path}: {key}", MOVE_AWAY):
            return load_json(row[0])

    def set(self, key: str, value: object) -> None:
        """Write a JSON value to the meta table."""
        with self._transaction():
            self._set(key, value)

    def history(self) -> Iterator[dict[str, Any]]:
        """The records of the finished steps, newest first."""
        rows = self._db.execute("SELECT metrics FROM steps ORDER BY step DESC")
        return (dict(load_json(metrics)) for (metrics,) in rows)

    def was_evaluated(self, step: int) -> bool:
        """True when the weights of `step` were evaluated, in this process or before a resume."""
        return any(record["step"] == step for record in self.get("evaluations") or ())

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Keep an evaluation's record in case metrics.jsonl is lost, and the checksums of its files."""
        with self._transaction():
            self._set("evaluations", [*(self.get("evaluations") or ()), dict(record)])
            self.checksums.record_files()
        self.checksums.files.clear()

    def enqueue(self, prompts: Iterable[Prompt], *, size: int = 0) -> None:
        """Add prompts to the run: they are queued.

        Args:
            prompts: with uids that are new in this run.
            size: rows of the dataset: the epoch is uid // size; 0 leaves it at 0.
        """
        step = self.step
        now = self._clock.wall()
        insert = "INSERT INTO prompts (uid, epoch, state, admitted_after, admitted_at) VALUES (?, ?, 'queued', ?, ?)"
        with self._transaction():
            for prompt in prompts:
                epoch = prompt.uid // size if size else 0
                try:
                    self._db.execute(insert, (prompt.uid, epoch, step, now))
                except sqlite3.IntegrityError as error:
                    state = self.state_of(prompt.uid) or error
                    reason = f"prompt {prompt.uid} was admitted before ({state}); a uid is used once"
                    raise ValueError(reason) from error

    def generating(self, uids: Iterable[int]) -> None:
        """Prompts go to the engine: queued → generating, one more attempt."""
        with self._transaction():
            for uid in uids:
                self._move(uid, "generating", "attempts = attempts + 1, generating_at = :now")

    def scored(self, groups: Iterable[Group]) -> None:
        """Groups are complete and scored: generating → scored."""
        columns = "scored_at = :now, policy_version = :version, completions = :completions, invalid = :invalid"
        with self._transaction():
            for group in groups:
                values = [score.value for score in group.scores if score.valid]
                mean = sum(values) / len(values) if values else None
                self._move(
                    group.prompt.uid,
                    "scored",
                    f"{columns}, reward = :reward",
                    version=group.oldest_version,
                    completions=len(group.completions),
                    invalid=len(group.scores) - len(values),
                    reward=mean,
                )

    def select(self, step: int, kept: Iterable[int], dropped: Mapping[int, str] | None = None) -> None:
        """Decide what `step` trains on: scored → selected, and scored or generating → dropped.

        Args:
            step: `journal.step + 1` or later.
            kept: uids that are trained.
            dropped: uid → reason, one word (`uniform`, `failed`, `pruned` …).
        """
        if step <= self.step:
            raise ValueError(f"select(step={step}): step {self.step} is finished already")
        with self._transaction():
            for uid in kept:
                self._move(uid, "selected", "selected_at = :now, step = :step", step=step)
            for uid, reason in (dropped or {}).items():
                columns = "selected_at = :now, step = :step, reason = :reason"
                self._move(uid, "dropped", columns, step=step, reason=reason)

    def consume(self, step: int, cursor_state: object, metrics: Mapping[str, Any], *, version: int) -> None:
        """Finish `step`: the prompts that were selected for it, or dropped in it, become consumed.

        Args:
            step: `journal.step + 1`.
            cursor_state: the data cursor after all prompts admitted so far, any JSON value.
            metrics: the step's record; numbers that are not finite are stored as null.
            version: policy version after the step.
        """
        with self._transaction():
            following = self.step + 1
            if step != following:
                raise ValueError(f"consume(step={step}): the step to finish is {following}")
            row = (step, version, dumps(cursor_state), dumps(metrics), self._clock.wall())
            self._db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", row)
            for (uid,) in self._db.execute("SELECT uid FROM prompts WHERE step = ?", (step,)).fetchall():
                self._move(uid, "consumed", "consumed_at = :now")
            self.checksums.record_step(step)
            self.checksums.record_files()
        self.checksums.files.clear()

    def damage(self) -> list[str]:
        """The parts of the journal whose content is not what was written."""
        try:
            verdict = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if verdict != "ok":
                return [" ".join(str(verdict).split())]
            now = self.checksums.now()
            recorded = self.checksums.read()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            return [" ".join(str(error).split())]
        parts = []
        for name, checksum in recorded.items():
            if name.startswith(PART) and now.get(name) != checksum:
                parts.append(name.removeprefix(PART))
        return parts

    def state_of(self, uid: int) -> State | None:
        """The state of a prompt; None if it was never admitted."""
        row: tuple[State] | None = self._db.execute("SELECT state FROM prompts WHERE uid = ?", (uid,)).fetchone()
        return None if row is None else row[0]

    def counts(self) -> dict[State, int]:
        """Number of prompts by state."""
        return dict(self._db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state").fetchall())

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        if self._opened and not self.path.exists():  # SQLite would continue in a deleted file
            remedy = "resume the run (--resume): the steps up to the last checkpoint are restored from metrics.jsonl"
            raise UserError(f"{self.path} was deleted during the run", remedy=remedy)
        try:
            # a writer at once: a later upgrade could fail with "database is locked"
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:  # SQLite rolls back by itself when the disk is full
                self._db.execute("ROLLBACK")
            full = sqlite_disk_full(error, self.path) if isinstance(error, sqlite3.OperationalError) else None
            if full:
                raise full from error
            raise

    def _move(self, uid: int, target: State, columns: str, **values: Any) -> None:
        """Change the state of a prompt, inside a transaction."""
        named = {**values, "now": self._clock.wall(), "uid": uid, "target": target}
        update = f"UPDATE prompts SET state = :target, {columns} WHERE uid = :uid"
        try:
            changed = self._db.execute(update, named).rowcount
        except sqlite3.IntegrityError as error:
            raise ValueError(f"prompt {uid} is {self.state_of(uid)}, and can't become {target} ({error})") from error
        if not changed:
            raise ValueError(f"prompt {uid} is not in the journal, so it can't become {target}; enqueue it first")

    def _set(self, key: str, value: object) -> None:
        insert = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        self._db.execute(insert, (key, dumps(value)))
        self.checksums.record_key(key, dumps(value))


@contextmanager
def copied_journal(path: Path) -> Iterator[Journal]:
    """A copy of a journal, for reading: SQLite may write beside a file that it only reads. It is empty where there is
    no journal."""
    with TemporaryDirectory() as place:
        for file in path.parent.glob(f"{path.name}*"):
            copyfile(file, Path(place, file.name))
        copy = Path(place, path.name)
        try:
            journal = Journal(copy)
        except UserError as error:
            raise UserError(error.reason.replace(str(copy), str(path)), remedy=error.remedy) from error
        with journal:
            yield journal


class JournalChecksums:
    """The table `checksums` of an open journal: of the files of the run folder, and of the journal's own content. The
    journal makes the transactions.

    A file's checksum is written by the transaction that ends its step or evaluation. A kill before that leaves a file
    of which the journal knows nothing, and a resume writes it again; so what the journal knows is damaged if it
    differs.
    """

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
        rows += self._db.execute(query, (step,)).fetchall()
        return _of_text(repr(rows))


def _of_text(text: str) -> Checksum:
    return Checksum.of_bytes(text.encode())


# ---- the tables, and the rules that the database itself enforces -----------------------------------------------------

FORMAT = 2

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE steps (
    step INTEGER PRIMARY KEY,                 -- 1, 2, 3 ... without a hole
    policy_version INTEGER NOT NULL,          -- updates published until then; a step may make none
    cursor TEXT,                              -- JSON: the data cursor behind every prompt admitted so far
    metrics TEXT NOT NULL,                    -- JSON: the step's record
    time TEXT NOT NULL
) STRICT;

CREATE TABLE prompts (
    uid INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('queued', 'generating', 'scored', 'selected', 'dropped', 'consumed')),
    admitted_after INTEGER NOT NULL,          -- the journal's step when the prompt was admitted
    attempts INTEGER NOT NULL DEFAULT 0,      -- how often it began to generate
    policy_version INTEGER,                   -- oldest version among its tokens
    completions INTEGER,
    invalid INTEGER,                          -- completions whose scorer failed
    reward REAL,                              -- mean over the valid completions
    step INTEGER,                             -- the step that selected or dropped it
    reason TEXT,                              -- why it was dropped
    admitted_at TEXT NOT NULL, generating_at TEXT, scored_at TEXT, selected_at TEXT, consumed_at TEXT,
    CHECK ((state IN ('selected', 'dropped', 'consumed')) = (step IS NOT NULL)),
    CHECK (state != 'dropped' OR reason IS NOT NULL),
    CHECK (state != 'selected' OR reason IS NULL)
) STRICT;
CREATE INDEX prompts_by_state ON prompts (state, step);

CREATE TABLE checksums (
    name TEXT PRIMARY KEY,                    -- a file of the folder, or a part of the journal: `run.sqlite step 12`
    step INTEGER NOT NULL,                    -- the step that wrote it; -1: none, and a rewind keeps it
    size INTEGER NOT NULL,
    crc32 TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE moves (source TEXT NOT NULL, target TEXT NOT NULL, PRIMARY KEY (source, target)) STRICT, WITHOUT ROWID;
INSERT INTO moves VALUES ('queued', 'generating'), ('generating', 'scored'), ('generating', 'dropped'),
    ('scored', 'selected'), ('scored', 'dropped'), ('selected', 'consumed'), ('dropped', 'consumed');

CREATE TRIGGER prompts_begin BEFORE INSERT ON prompts WHEN NEW.state != 'queued'
    BEGIN SELECT RAISE(ABORT, 'a prompt starts as queued'); END;
CREATE TRIGGER prompts_move BEFORE UPDATE ON prompts
    WHEN NOT EXISTS (SELECT 1 FROM moves WHERE source = OLD.state AND target = NEW.state)
    BEGIN SELECT RAISE(ABORT, 'illegal move of a prompt'); END;
CREATE TRIGGER prompts_consume BEFORE UPDATE ON prompts
    WHEN NEW.state = 'consumed' AND (NEW.step IS NOT OLD.step OR NOT EXISTS (SELECT 1 FROM steps WHERE step = NEW.step))
    BEGIN SELECT RAISE(ABORT, 'a prompt is consumed by the step that selected it'); END;
CREATE TRIGGER steps_in_order BEFORE INSERT ON steps WHEN NEW.step != (SELECT COALESCE(MAX(step), 0) FROM steps) + 1
    BEGIN SELECT RAISE(ABORT, 'a step follows the one before it'); END;
CREATE TRIGGER steps_stand BEFORE UPDATE ON steps BEGIN SELECT RAISE(ABORT, 'a step is never rewritten'); END;
"""

STATEMENTS = re.split(r"(?<=;)\s+(?=CREATE|INSERT)", SCHEMA.strip())  # `executescript` would commit the transaction
