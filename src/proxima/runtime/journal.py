"""The journal: where each prompt stands, in a SQLite file that survives `kill -9` at any instant.

    queued → generating → scored → selected | dropped → consumed

A prompt that failed in the engine goes from generating back to queued, or is dropped with a reason. `consume` ends a
step: in one transaction the step's prompts become consumed and the step, the data cursor, the policy version and the
metrics are written. So either all of a step happened or none of it. The rules stand in the database itself (checks and
triggers), not only in this
file: no code path can consume a prompt twice or skip a state.
"""

import errno
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from proxima.data import UserError
from proxima.data.jsonl import dumps
from proxima.runtime.clock import Clock, SystemClock

if TYPE_CHECKING:  # at run time the journal needs nothing but the standard library
    from proxima.data import Group, Prompt

State = Literal["queued", "generating", "scored", "selected", "dropped", "consumed"]

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

CREATE TABLE moves (source TEXT NOT NULL, target TEXT NOT NULL, PRIMARY KEY (source, target)) STRICT, WITHOUT ROWID;
INSERT INTO moves VALUES ('queued', 'generating'), ('generating', 'queued'), ('generating', 'scored'), ('generating',
'dropped'),
    ('scored', 'selected'), ('scored', 'dropped'), ('selected', 'consumed'), ('dropped', 'consumed');

CREATE TRIGGER prompts_begin BEFORE INSERT ON prompts WHEN NEW.state != 'queued'
    BEGIN SELECT RAISE(ABORT, 'a prompt begins as queued'); END;
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


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """A prompt's row, as `unconsumed` and `entry` return it; times are ISO 8601, UTC."""

    uid: int
    epoch: int
    state: State
    admitted_after: int
    attempts: int
    policy_version: int | None
    completions: int | None
    invalid: int | None
    reward: float | None
    step: int | None
    reason: str | None
    admitted_at: str
    generating_at: str | None
    scored_at: str | None
    selected_at: str | None
    consumed_at: str | None


class Journal:
    """The states of a run's prompts, and its steps.

    Every method that writes is one transaction, on disk when it returns (WAL, `synchronous=FULL`). Any number of
    readers (a viewer, the report) may have the file open meanwhile; the run folder's lock keeps a second writer out.

    Args:
        path: the SQLite file; made when absent.
        clock: stamps the rows.

    Raises:
        OSError: the disk is full; from any method, which has then changed nothing.
        ValueError: the file is no journal, or one of another format; from the other methods: a move that the states
            don't allow, naming the prompt, where it stands and what it would have needed. Such a transaction changes
            nothing.
    """

    def __init__(self, path: Path | str, clock: Clock | None = None) -> None:
        self.path = Path(path)
        self._clock = clock or SystemClock()
        self._db = sqlite3.connect(self.path, isolation_level=None, timeout=30.0)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            with (
                self._transaction()
            ):  # two processes that open a new file at once: the second sees the first one's tables
                if not self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
                    for statement in _statements(SCHEMA):
                        self._db.execute(statement)
                    self._set("format", FORMAT)
            found = self.get("format")
        except sqlite3.DatabaseError as error:
            self._db.close()
            if (
                isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode != sqlite3.SQLITE_ERROR
            ):  # the disk
                raise UserError(
                    f"{self.path} can't be read or written ({error}); see to the disk, then go on with --resume"
                ) from error
            raise UserError(
                f"{self.path} is not a journal of proxima ({error}); move it away or use another run folder"
            ) from error
        if found != FORMAT:
            self._db.close()
            raise UserError(
                f"{self.path}: format {found}, this version reads {FORMAT}; resume with the version that began the run"
            )

    def close(self) -> None:
        """Release the file. The journal needs no closing to be safe."""
        self._db.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def step(self) -> int:
        """The last finished step; 0 before the first."""
        return int(self._db.execute("SELECT COALESCE(MAX(step), 0) FROM steps").fetchone()[0])

    @property
    def version(self) -> int:
        """The policy version behind the last finished step, the number of updates published; 0 before the first."""
        row = self._db.execute("SELECT policy_version FROM steps ORDER BY step DESC LIMIT 1").fetchone()
        return int(row[0]) if row else 0

    @property
    def cursor(self) -> Any:
        """The data cursor behind every prompt admitted so far, as the last `consume` or `admit` gave it; None before
        the first."""
        return self.get("cursor")

    def get(self, key: str) -> Any:
        """A value of the meta table, None when absent."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return json.loads(row[0]) if row else None

    def set(self, key: str, value: Any) -> None:
        """Write a JSON value to the meta table."""
        with self._transaction():
            self._set(key, value)

    def claim(self, fingerprint: str) -> None:
        """Bind the journal to a configuration: the first call stores `fingerprint`, later ones must bring the same.

        Raises:
            ValueError: the run was begun with another model, data or algorithm.
        """
        with self._transaction():
            found = self.get("fingerprint")
            if found is None:
                self._set("fingerprint", fingerprint)
            elif found != fingerprint:
                raise UserError(
                    f"{self.path.parent}: the run was begun with another configuration ({found}, now {fingerprint}); "
                    "resume with the config.yaml of the folder, or choose another folder"
                )

    def admit(self, prompts: Iterable["Prompt"], *, size: int = 0, cursor_state: Any = None) -> None:
        """Take prompts from the data into the run: they are queued.

        Args:
            prompts: each uid for the first time in this run.
            size: rows of the dataset, which makes the epoch out of the uid (uid // size); 0 leaves the epoch at 0.
            cursor_state: the data cursor behind these prompts, any JSON value. Needed when `rewind` is not called on
                every resume.
        """
        step, now = self.step, self._clock.wall()
        rows = [(p.uid, p.uid // size if size else 0, step, now) for p in prompts]
        with self._transaction():
            for row in rows:
                try:
                    self._db.execute(
                        "INSERT INTO prompts (uid, epoch, state, admitted_after, admitted_at) VALUES (?, ?, "
                        "'queued', ?, ?)",
                        row,
                    )
                except sqlite3.IntegrityError as error:
                    found = self.prompt(row[0])
                    raise UserError(
                        f"prompt {row[0]} was admitted before ({found.state if found else error}); a uid is used once"
                    ) from error
            if cursor_state is not None:
                self._set("cursor", cursor_state)

    def generating(self, uids: Iterable[int]) -> None:
        """The prompts went to the engine: queued → generating, one more attempt."""
        self._move(uids, "generating", "attempts = attempts + 1, generating_at = :now")

    def requeue(self, uids: Iterable[int]) -> None:
        """The engine lost the prompts: generating → queued. The attempts stay counted."""
        self._move(uids, "queued", "generating_at = NULL")

    def scored(self, groups: Iterable["Group"]) -> None:
        """The groups are complete, with their scores: generating → scored."""
        with self._transaction():
            for group in groups:
                values = [s.value for s in group.scores if s.valid]
                facts = {
                    "version": group.oldest_version,
                    "completions": len(group.completions),
                    "invalid": len(group.scores) - len(values),
                    "reward": sum(values) / len(values) if values else None,
                }
                columns = (
                    "scored_at = :now, policy_version = :version, completions = :completions, invalid = "
                    ":invalid, reward = :reward"
                )
                self._move_one(group.prompt.uid, "scored", columns, facts)

    def select(self, step: int, kept: Iterable[int], dropped: Mapping[int, str] | None = None) -> None:
        """Decide what `step` trains on: scored → selected, and scored (or generating, when it failed) → dropped.

        Args:
            step: the step to come, `journal.step + 1` or later.
            kept: uids that enter the batch.
            dropped: uid → reason, in one word (`uniform`, `failed`, `pruned` …).
        """
        if step <= self.step:
            raise UserError(f"select(step={step}): step {self.step} is finished already")
        with self._transaction():
            for uid in kept:
                self._move_one(uid, "selected", "selected_at = :now, step = :step", {"step": step})
            for uid, reason in (dropped or {}).items():
                self._move_one(
                    uid,
                    "dropped",
                    "selected_at = :now, step = :step, reason = :reason",
                    {"step": step, "reason": reason},
                )

    def consume(
        self, step: int, uids: Iterable[int], cursor_state: Any, metrics: Mapping[str, Any], version: int | None = None
    ) -> None:
        """End `step`: its selected and dropped prompts become consumed, and the step is counted. All or nothing.

        Args:
            step: `journal.step + 1`.
            uids: exactly the prompts selected for the step; the dropped ones may be named, and go along in any case.
            cursor_state: the data cursor behind every prompt admitted so far, any JSON value.
            metrics: the step's record; numbers that are not finite are stored as null.
            version: policy version of the weights that the step made; None: the step's number.
        """
        wanted = set(uids)
        with self._transaction():
            if step != self.step + 1:
                raise UserError(
                    f"consume(step={step}): step {self.step} is the last finished, so the next is {self.step + 1}"
                )
            held = dict(
                self._db.execute(
                    "SELECT uid, state FROM prompts WHERE step = ? AND state != 'consumed'", (step,)
                ).fetchall()
            )
            missing = {uid for uid, state in held.items() if state == "selected"} - wanted
            if missing or wanted - held.keys():
                raise UserError(
                    f"consume(step={step}): "
                    + (
                        f"prompts {sorted(missing)} were selected for it but not named"
                        if missing
                        else f"prompts {sorted(wanted - held.keys())} were not selected for it"
                    )
                )
            self._db.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?, ?)",
                (step, step if version is None else version, dumps(cursor_state), dumps(metrics), self._clock.wall()),
            )
            for uid in held:
                self._move_one(uid, "consumed", "consumed_at = :now", {})
            self._set("cursor", cursor_state)

    def unconsumed(self) -> list[PromptRecord]:
        """What was admitted and not consumed, in the order of uid: the work that an interrupted run still holds."""
        return self._records("WHERE state != 'consumed' ORDER BY uid")

    def prompt(self, uid: int) -> PromptRecord | None:
        """Where one prompt stands; None if it was never admitted."""
        return next(iter(self._records("WHERE uid = ?", (uid,))), None)

    def consumed(self, step: int) -> list[PromptRecord]:
        """What a finished step consumed, in the order of uid; the dropped ones have a `reason`."""
        return self._records("WHERE state = 'consumed' AND step = ? ORDER BY uid", (step,))

    def counts(self) -> dict[State, int]:
        """How many prompts are in each state that has any."""
        return dict(self._db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state").fetchall())

    def metrics(self, step: int) -> dict[str, Any] | None:
        """The record of a finished step, None for a step not finished: what metrics.jsonl lost to a kill can be written
        again."""
        row = self._db.execute("SELECT metrics FROM steps WHERE step = ?", (step,)).fetchone()
        return None if row is None else dict(json.loads(row[0]))

    def rewind(self, step: int) -> Any:
        """Make the journal what it was right after `step`, and return the data cursor of that moment (None for step 0).

        Call it on every resume with the step of the checkpoint that was loaded. Later steps are deleted. A prompt
        admitted after `step`
        is deleted: the cursor brings it again. A prompt admitted before that and not consumed by then (asynchronous
            runs) is queued again,
        because the cursor is past it.

        Raises:
            ValueError: the journal has not come as far as `step`.
        """
        with self._transaction():
            last = self.step
            if not 0 <= step <= last:
                raise UserError(
                    f"rewind(step={step}): the journal ends at step {last}; is the checkpoint of another run?"
                )
            self._db.execute("DELETE FROM prompts WHERE admitted_after >= ?", (step,))
            waiting = self._db.execute(
                "SELECT uid, epoch, 'queued', admitted_after, attempts, admitted_at FROM prompts WHERE state != "
                "'consumed' OR step > ?",
                (step,),
            ).fetchall()
            self._db.execute("DELETE FROM prompts WHERE state != 'consumed' OR step > ?", (step,))
            self._db.executemany(
                "INSERT INTO prompts (uid, epoch, state, admitted_after, attempts, admitted_at) VALUES (?, ?, ?, "
                "?, ?, ?)",
                waiting,
            )
            self._db.execute("DELETE FROM steps WHERE step > ?", (step,))
            row = self._db.execute("SELECT cursor FROM steps WHERE step = ?", (step,)).fetchone()
            cursor = json.loads(row[0]) if row else None
            self._set("cursor", cursor)
        return cursor

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")  # at once a writer: a later upgrade could fail with "database is locked"
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:  # a full disk may have rolled back by itself
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise OSError(
                    errno.ENOSPC, "no space left; free some and go on with --resume", str(self.path)
                ) from error
            raise

    def _move(self, uids: Iterable[int], target: State, columns: str) -> None:
        with self._transaction():
            for uid in uids:
                self._move_one(uid, target, columns, {})

    def _move_one(self, uid: int, target: State, columns: str, values: Mapping[str, Any]) -> None:
        named = {**values, "now": self._clock.wall(), "uid": uid, "target": target}
        try:
            changed = self._db.execute(
                f"UPDATE prompts SET state = :target, {columns} WHERE uid = :uid", named
            ).rowcount
        except sqlite3.IntegrityError as error:
            found = self.prompt(uid)
            sources = [
                row[0]
                for row in self._db.execute("SELECT source FROM moves WHERE target = ? ORDER BY source", (target,))
            ]
            state = found.state if found else "absent"
            raise UserError(
                f"prompt {uid} is {state}, and only {' or '.join(sources)} becomes {target} ({error})"
            ) from error
        if not changed:
            raise UserError(f"prompt {uid} is not in the journal, so it can't become {target}; admit it first")

    def _records(self, where: str, values: Sequence[Any] = ()) -> list[PromptRecord]:
        names = list(PromptRecord.__dataclass_fields__)
        rows = self._db.execute(f"SELECT {', '.join(names)} FROM prompts {where}", values).fetchall()
        return [PromptRecord(**dict(zip(names, row, strict=True))) for row in rows]

    def _set(self, key: str, value: Any) -> None:
        self._db.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, dumps(value))
        )


def _statements(script: str) -> Iterator[str]:
    """Split a script, because `executescript` would commit the transaction around it."""
    held = ""
    for line in script.splitlines():
        held += line + "\n"
        if sqlite3.complete_statement(held):
            yield held
            held = ""
