"""Follows metrics.jsonl of a run while it grows, and keeps what the sweep's views show of the run."""

import json
import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from proxima.evaluate.headline import Headline
from proxima.lab.sweep_plan import PlannedRun

RECENT = 20  # the median duration of this many steps estimates the rest


class RunState(StrEnum):
    """State of a run in a sweep. Ctrl-C stops a run; the same command resumes it."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass
class RunProgress:
    """Progress of a run."""

    run: PlannedRun
    state: RunState = RunState.WAITING
    step: int = 0  # finished steps
    seconds: float = 0.0  # their training clock, the sum of `time/step`
    reward: float | None = None  # `reward/mean` of the last step
    evals: list[dict[str, Any]] = field(default_factory=list)  # the records of the evaluations
    recent: list[float] = field(default_factory=list)  # seconds of the last steps
    error: str | None = None  # why it failed, on one line
    before: bool = field(default=False, init=False)  # the run was over before this sweep started

    @property
    def headline(self) -> Headline:
        """The figure that stands for an evaluation."""
        return Headline.of(self.evals)

    @property
    def evaluated(self) -> list[tuple[int, float]]:
        """(step, `headline`) of the evaluations that have it."""
        values = ((int(r["step"]), self.headline.value(r)) for r in self.evals)
        return [(step, value) for step, value in values if value is not None]

    @property
    def held_out(self) -> float | None:
        """`headline` of the last evaluation."""
        return self.evaluated[-1][1] if self.evaluated else None

    @property
    def remaining(self) -> float | None:
        """Seconds of training left, without evaluations; None before the first step."""
        if self.state is RunState.DONE:
            return 0.0
        return statistics.median(self.recent) * max(self.run.steps - self.step, 0) if self.recent else None

    def update(self, record: dict[str, Any]) -> None:
        """Take a record of metrics.jsonl into account."""
        step = int(record.get("step", 0))
        if record.get("kind") == "train":
            self.step, self.reward = step, record.get("reward/mean")
            seconds = float(record.get("time/step") or 0.0)
            self.seconds += seconds
            self.recent = [*self.recent, seconds][-RECENT:]
        elif record.get("kind") == "eval":
            self.evals.append(record)

    def reset(self) -> None:
        """Before the file is read from its start: a resume truncates it."""
        self.step, self.seconds, self.reward, self.evals, self.recent = 0, 0.0, None, [], []


class MetricsFollower:
    """Reads what a run has appended to its metrics.jsonl since the last poll, and updates its progress."""

    def __init__(self, progress: RunProgress) -> None:
        self.progress = progress
        self.file: Path = progress.run.folder / "metrics.jsonl"
        self._offset, self._inode = 0, -1

    def poll(self) -> list[dict[str, Any]]:
        """The new records; an incomplete line waits for the next poll. A truncated file is read from its start."""
        try:
            stat = self.file.stat()
            if stat.st_size < self._offset or stat.st_ino != self._inode:
                self.progress.reset()
                self._offset, self._inode = 0, stat.st_ino
            if stat.st_size == self._offset:
                return []
            with self.file.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return []
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        records = []
        for line in complete.splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # damaged: the run reports it on resume, and `compare` when it reads the folder
                continue
            if isinstance(record, dict):
                self.progress.update(record)
                records.append(record)
        return records
