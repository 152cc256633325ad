"""The run folder: its files, its lock, and how it is restored to an earlier step.

config.yaml  environment.json  metrics.jsonl  run.sqlite  rollouts/000012.parquet  evals/000012-after.parquet
images/  checkpoints/000040/  timeline.json  summary.json  report.html  log.txt  engine.log
environments.log
"""

import errno
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.evaluation.eval_files import eval_file_name, eval_files_in, set_of
from proxima.model.images.image_folder import delete_images
from proxima.reward.verdicts import VERDICTS
from proxima.rollout.episodes.settings import ENVIRONMENTS_LOG
from proxima.runtime.watch.clock import Clock
from proxima.system.atomic_files import check_writable, flush_to_disk, make_folder, remove_empty, write_atomic
from proxima.system.damage import reading
from proxima.system.jsonl import dumps, json_text, read_records, utf8
from proxima.system.locks import OWNER, FileLock, open_regular

MARKS = ("run.sqlite", "metrics.jsonl", "config.yaml")

WAIT = "wait for it, stop it, or set folder=PATH"
NOTE_BYTES = 1000  # of who holds a lock
WITHOUT_LOCKS = (
    "{folder} is on a file system without locks; a file in it stands for the lock, which only this machine can tell "
    "from one that a killed process has left"
)


def new_run_folder(folder: str | None, recipe: str | None, clock: Clock | None = None) -> Path:
    """The run folder of a config, or without one a new one in `runs` with the recipe's name and the time."""
    if folder:
        return Path(folder).expanduser()
    name = Path(recipe).stem if recipe else "run"
    stamp = (clock or Clock()).stamp()
    return Path("runs") / f"{name}-{stamp}"


def existing_run(folder: Path | str) -> "RunFolder":
    """The folder of a run; UserError if it contains no run."""
    place = RunFolder(folder)
    if not place.has_run:
        where = "give the folder that `proxima train` printed"
        raise UserError(f"{place.path} is not a run", remedy=where)
    return place


def run_of_model(model: Path | str) -> "RunFolder":
    """The folder of the run that has written a model, RUN/checkpoints/STEP/model, or of RUN itself; of no run, a folder
    without one."""
    place = Path(model).expanduser().absolute()
    if len(place.parents) > 2 and place.parents[1].name == "checkpoints":
        place = place.parents[2]
    return RunFolder(place)


class RunFolder:
    """Paths and files of one run. The constructor touches nothing; `begin` creates the folder and locks it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.journal = self.path / "run.sqlite"
        self.rollouts = self.path / "rollouts"
        self.evals = self.path / "evals"
        self.images = self.path / "images"
        self.checkpoints = self.path / "checkpoints"
        self.timeline = self.path / "timeline.json"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.log = self.path / "log.txt"
        self.engine_log = self.path / "engine.log"
        self.servers = self.path / "servers.txt"
        self.trackers = self.path / "trackers"
        self.lock = self.path / ".lock"
        self._lock: FolderLock | None = None
        self._made: list[Path] = []  # by `begin`, the innermost first
        self.earlier_warnings: list[dict[str, Any]] = []  # of the run before a rewind, up to its step
        self.ended: dict[str, Any] = {}  # summary.json before a rewind, if the run had ended after its step

    def rollout_file(self, step: int) -> Path:
        """The completions of a step."""
        return self.rollouts / f"{step:06d}.parquet"

    def eval_file(self, step: int, label: str) -> Path:
        """The completions of an evaluation, with a label as in `eval_file_name`."""
        return self.evals / eval_file_name(step, label)

    def eval_files(self, name: str = "") -> list[Path]:
        """The files of the evaluations of `eval.task`, or of a further set, in the order of the steps."""
        return [file for file in eval_files_in(self.evals) if set_of(file) == name]

    def eval_sets(self) -> list[str]:
        """The names of the further held-out sets that have answers."""
        names = {set_of(file) for file in eval_files_in(self.evals)}
        return sorted(filter(None, names))

    def checkpoint(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.checkpoints / f"{step:06d}"

    @property
    def has_run(self) -> bool:
        """True when the folder contains a run."""
        return any((self.path / name).exists() for name in MARKS)

    def check(self, *, resume: bool = False, overwrite: bool = False) -> None:
        """Raise before a model is loaded if `begin` would refuse.

        Raises:
            FieldError: the folder can't be made.
            UserError: there is a run and neither resume nor overwrite is set; `path` is a file; or the folder contains
                something other than a run.
        """
        if not self.path.exists():
            return check_writable("folder", str(self.path), remedy="give another path")
        if not self.path.is_dir():
            raise UserError(f"{self.path} is a file; give the run its own folder with folder=PATH")
        if resume or self._is_empty():
            return
        if not self.has_run:
            raise UserError(f"{self.path} contains files but no run; give the run its own folder with folder=PATH")
        if not overwrite:
            raise UserError(
                f"{self.path} contains a run; continue it with --resume, delete it with --overwrite, or set folder=PATH"
            )

    def begin(self, *, resume: bool = False, overwrite: bool = False) -> bool:
        """Create the folder and lock it; returns True when there is a run to resume.

        `resume` in a folder without a run starts one, so the same command works whenever the last one died.

        Raises:
            UserError: as `check`, or another process uses the folder.
        """
        self.check(resume=resume, overwrite=overwrite)
        self._made = make_folder(self.path)
        self._lock = FolderLock(self.lock)
        if overwrite:
            self._clear()
        for folder in (self.rollouts, self.evals, self.checkpoints):
            folder.mkdir(exist_ok=True)
        flush_to_disk(self.path)
        return resume and self.has_run

    def lock_for_reading(self) -> None:
        """Keep writers out until `release`; other readers may come.

        Raises:
            UserError: a process writes to the folder.
        """
        if self.lock.is_file():  # a copy may lack it
            self._lock = FolderLock(self.lock, shared=True)

    @property
    def warnings(self) -> list[str]:
        """What whoever starts a run in the folder must know."""
        if self._lock is None or self._lock.warning is None:
            return []
        return [self._lock.warning]

    @property
    def is_gone(self) -> bool:
        """True if the folder was deleted or moved after `begin`."""
        return self._lock is not None and self._lock.is_gone

    def release(self) -> None:
        """Unlock the folder; the end of the process, however it ends, unlocks it too."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        """Undo `begin`, if no run has started since: a refused run leaves nothing. Files of others, and their folder,
        stay."""
        if self._lock is None or self.has_run:
            return
        for file in (self.log, self._lock.path):
            file.unlink(missing_ok=True)
        remove_empty((self.rollouts, self.evals, self.checkpoints, *self._made))

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append a record (with `kind`, `step` and `time`) to metrics.jsonl; it is on disk when this returns.

        Raises:
            OSError: the disk is full or read-only; the existing lines are unchanged.
        """
        line = (dumps(record) + "\n").encode("utf-8")
        with self.metrics.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                written = file.write(line)
                if written != len(line):  # a nearly full disk takes a part without an error
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(before)
                error.filename = str(self.metrics)
                raise

    def read_metrics(self) -> list[dict[str, Any]]:
        """All records in order, without an incomplete last line; UserError if the file is damaged."""
        with reading(self.metrics, "restore it, or delete it: a resume writes it again from run.sqlite"):
            return read_records(self.metrics)

    def elapsed(self) -> float:
        """Seconds that the run took, over all resumes: up to its last record, or up to its end where it ended there."""
        times = [float(record.get("time") or 0) for record in self.read_metrics()]
        ended = float(self.ended.get("seconds", 0))
        return max([ended, *times])

    def write_config(self, text: str) -> None:
        """Write config.yaml."""
        write_atomic(self.config, text)

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Write environment.json."""
        write_atomic(self.environment, json_text(facts))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        write_atomic(self.summary, json_text(summary))

    def remove_outcome(self) -> None:
        """Delete what says how the run ended: it goes on."""
        for path in (self.summary, self.report):
            path.unlink(missing_ok=True)

    def _is_empty(self) -> bool:
        """True when the folder contains nothing but what `begin` creates, and the addresses and logs of servers and
        ranks that a supervisor has started before."""
        if self.has_run:
            return False
        skeleton = {self.lock.name, self.log.name, self.rollouts.name, self.evals.name, self.checkpoints.name}
        skeleton.add(self.servers.name)
        others = [entry for entry in self.path.iterdir() if entry.name not in skeleton]
        return all(entry.name.endswith(".part") or entry.suffix == ".log" for entry in others)

    def _clear(self) -> None:
        """Delete the files of the run; others stay."""
        journal = [self.journal.with_name(self.journal.name + end) for end in ("", "-wal", "-shm")]
        files = (self.config, self.environment, self.metrics, self.summary, self.report, self.log, self.engine_log)
        delete_images(self.images)
        folders = (self.rollouts, self.evals, self.checkpoints, self.trackers)
        logs = [*self.path.glob("engine.*.log"), self.path / ENVIRONMENTS_LOG, self.path / VERDICTS]
        for path in (*folders, *files, *logs, self.timeline, *journal):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


class FolderLock:
    """The lock of a run folder: one writer, with a note that says who it is, or any number of readers. Held from the
    constructor until `release`, or until the process ends, however it ends.

    A writer notes in the file who it is. If it is killed, the note stays, and what it started may hold the lock. A
    `shared` lock, for reading, lets other readers in.

    Attributes:
        warning: what whoever starts a run must know: the file system has no locks. None: it has.

    Raises:
        UserError: another process holds it, with the note of a writer and the remedy; or the file can't be opened.
    """

    def __init__(self, path: Path, *, shared: bool = False, remedy: str = WAIT) -> None:
        self.path = path
        self.shared = shared
        try:
            self._lock = FileLock(path, shared=shared)
        except BlockingIOError as error:
            reason = f"{path.parent} is in use by another process"
            note = ""
            with suppress(OSError), open_regular(path, "rb") as file:  # the file was deleted at this moment
                note = file.read(NOTE_BYTES).decode("utf-8", "replace").strip()
            if note:
                reason = f"{reason} ({note})"
            owner = path.with_name(path.name + OWNER)
            if owner.exists():
                remedy += f"; this file system has no locks: if that process has ended, remove {owner}"
            raise UserError(reason, remedy=remedy) from error
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ELOOP):  # neither a pipe, a device nor a link
                raise
            raise UserError(f"{path} is no regular file", remedy="remove it, or set folder=PATH") from error
        self.warning: str | None = None
        if self._lock.replaced and not shared:
            self.warning = WITHOUT_LOCKS.format(folder=path.parent)
        if not shared:
            self._lock.file.truncate(0)
            with suppress(OSError):  # a full disk: the lock holds without a note
                self._lock.file.write(_own_note().encode())

    @property
    def is_gone(self) -> bool:
        """True if the file was deleted or moved, and so perhaps the whole folder."""
        try:
            return not os.path.samestat(os.fstat(self._lock.file.fileno()), self.path.stat())
        except OSError:
            return True

    def release(self) -> None:
        """Unlock."""
        if not self.shared:
            self._lock.file.truncate(0)
        self._lock.release()


def _own_note() -> str:
    command = utf8(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200])
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return f"pid {os.getpid()} on {socket.gethostname()}, `{command}`, since {since}\n"
