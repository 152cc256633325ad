"""The run folder: what lies where, who may write, and how it is put back to an earlier step.

config.yaml  environment.json  metrics.jsonl  run.sqlite  rollouts/000012.parquet  evals/000012-after.parquet
checkpoints/000040/  summary.json  report.html  log.txt
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from proxima.data import UserError
from proxima.data.atomic_files import sync_folder, write_whole
from proxima.data.jsonl import dumps, read_lines, whole_length

try:
    import fcntl
except ImportError:  # Windows has none: two processes in one folder are not caught there
    fcntl = None  # type: ignore[assignment]

MARKS = ("run.sqlite", "metrics.jsonl", "config.yaml")
LABELS = ("before", "step", "after")


class RunFolder:
    """Paths and files of one run. Making the object touches nothing; `begin` makes the folder and takes its lock.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.journal = self.path / "run.sqlite"
        self.rollouts = self.path / "rollouts"
        self.evals = self.path / "evals"
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.log = self.path / "log.txt"
        self._lock: IO[bytes] | None = None

    def rollout_file(self, step: int) -> Path:
        """Where the completions of a step lie."""
        return self.rollouts / f"{step:06d}.parquet"

    def eval_file(self, step: int, label: str) -> Path:
        """Where the answers of an evaluation lie; `label` is `before`, `step` or `after`."""
        return self.evals / f"{step:06d}-{label}.parquet"

    def checkpoint(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.checkpoints / f"{step:06d}"

    @property
    def has_run(self) -> bool:
        """True when a run has begun here."""
        return any((self.path / name).exists() for name in MARKS)

    def check(self, *, resume: bool = False, overwrite: bool = False) -> None:
        """Say at once, before a model is loaded, whether `begin` would refuse.

        Raises:
            ValueError: a run is here and neither resume nor overwrite was asked for; both were; `path` is a file; or
                overwrite would delete a folder that holds something other than a run.
        """
        if resume and overwrite:
            raise UserError("resume and overwrite exclude each other; choose one")
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f"{self.path} is a file; give the run a folder of its own with folder=PATH")
        if resume or self._is_empty():
            return
        if not self.has_run:
            raise UserError(f"{self.path} holds files but no run; give the run a folder of its own with folder=PATH")
        if not overwrite:
            raise UserError(
                f"{self.path} holds a run already; go on with --resume, begin again with --overwrite, or set "
                "folder=PATH"
            )

    def begin(self, *, resume: bool = False, overwrite: bool = False) -> bool:
        """Make the folder, take its lock, and return whether there is a run in it to go on with.

        `resume` of a folder without a run begins one: so the same command is right whenever the last one died. A torn
            last line of
        metrics.jsonl is cut off.

        Raises:
            ValueError: as `check`, or another process is using the folder.
        """
        self.check(resume=resume, overwrite=overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        if overwrite:
            self._clear()
        for folder in (self.rollouts, self.evals, self.checkpoints):
            folder.mkdir(exist_ok=True)
        if self.metrics.exists() and (whole := whole_length(self.metrics)) < self.metrics.stat().st_size:
            os.truncate(self.metrics, whole)
        sync_folder(self.path)
        return resume and self.has_run

    def release(self) -> None:
        """Let another process use the folder. The lock also goes when the process dies, however it dies."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl, on disk when this returns. A failure (full disk) leaves the former lines as they
        were.

        Raises:
            ValueError: the record lacks `kind`, `step` or `time`.
            OSError: the disk is full or read-only.
        """
        for name in ("kind", "step", "time"):
            if name not in record:
                raise UserError(f"metrics record lacks {name!r}: {sorted(record)}")
        line = (dumps(record) + "\n").encode("utf-8")
        with self.metrics.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                written = file.write(line)
                if written != len(line):  # a nearly full disk takes a part without an error
                    raise OSError(28, "No space left on device", str(self.metrics))
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise

    def read_metrics(self) -> list[dict[str, Any]]:
        """All records in order; a torn last line is left out."""
        return read_lines(self.metrics)

    def elapsed(self) -> float:
        """Seconds that the run has taken up to its last record, over all resumes."""
        return max((float(r["time"]) for r in self.read_metrics()), default=0.0)

    def write_config(self, text: str) -> None:
        """Write config.yaml."""
        write_whole(self.config, text)

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Write environment.json."""
        write_whole(self.environment, dumps(facts, indent=2) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        write_whole(self.summary, dumps(summary, indent=2) + "\n")

    def rewind(self, step: int) -> None:
        """Make the records what they were right after `step`: later lines of metrics.jsonl and later Parquet files go,
        and so does what is only true of a finished run (summary, report). Checkpoints and log.txt stay.

        Step 0 is the run before anything happened: the evaluation before the first step goes too, because it is made
            again.
        """
        if self.metrics.exists():
            kept = [r for r in self.read_metrics() if 0 < step >= r["step"]]
            write_whole(self.metrics, "".join(dumps(r) + "\n" for r in kept))
        for folder in (self.rollouts, self.evals):
            for file in folder.glob("*.parquet"):
                number = file.stem.partition("-")[0]
                if number.isdigit() and not 0 < step >= int(number):
                    file.unlink()
        for path in (self.summary, self.report):
            path.unlink(missing_ok=True)

    def _is_empty(self) -> bool:
        """Nothing here but what `begin` made for a run that died before it wrote anything."""
        skeleton = {".lock", self.log.name, self.rollouts.name, self.evals.name, self.checkpoints.name}
        return not self.has_run and all(
            entry.name in skeleton or entry.name.endswith(".part") for entry in self.path.iterdir()
        )

    def _take_lock(self) -> None:
        lock = (self.path / ".lock").open("wb")
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.close()
                raise UserError(
                    f"{self.path} is in use by another process; wait for it, stop it, or set folder=PATH"
                ) from error
        self._lock = lock

    def _clear(self) -> None:
        """Delete the run's own files; what else lies in the folder stays."""
        for folder in (self.rollouts, self.evals, self.checkpoints):
            shutil.rmtree(folder, ignore_errors=True)
        journal = [self.journal.with_name(self.journal.name + end) for end in ("", "-wal", "-shm")]
        for path in (self.config, self.environment, self.metrics, self.summary, self.report, self.log, *journal):
            path.unlink(missing_ok=True)
