"""metrics.jsonl of a run that is still going: read a little further each time, and what is known of the run by then."""

import json
import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from proxima.lab.sweep_plan import PlannedRun

RECENT = 20  # steps whose median duration says how long the rest will take


class RunState(StrEnum):
    """Of a run in a sweep. `stopped` was ended by Ctrl-C and goes on with the same command."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass
class RunProgress:
    """Where a run stands.

    Args:
        step: steps finished; `seconds` of training clock they took (the sum of `time/step`).
        reward, accuracy, evaluated: `reward/mean` of the last step; accuracy of the first and the last evaluation with
            their steps.
        error: why it failed, in a line.
        before: True for a run that was over before this sweep began.
    """

    run: PlannedRun
    state: RunState = RunState.WAITING
    step: int = 0
    seconds: float = 0.0
    reward: float | None = None
    evaluated: list[tuple[int, float]] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    error: str | None = None
    before: bool = False

    @property
    def accuracy(self) -> float | None:
        """Of the last evaluation."""
        return self.evaluated[-1][1] if self.evaluated else None

    @property
    def left(self) -> float | None:
        """Seconds of training to come, by the median of the last steps; None before the first one. Evaluations are not
        counted in."""
        if self.state is RunState.DONE:
            return 0.0
        return statistics.median(self.recent) * max(self.run.steps - self.step, 0) if self.recent else None

    def take(self, record: dict[str, Any]) -> None:
        """Learn from a line of metrics.jsonl."""
        step = int(record.get("step", 0))
        if record.get("kind") == "train":
            self.step, self.reward = step, record.get("reward/mean")
            spent = float(record.get("time/step") or 0.0)
            self.seconds += spent
            self.recent = [*self.recent, spent][-RECENT:]
        elif record.get("kind") == "eval" and record.get("accuracy") is not None:
            self.evaluated.append((step, float(record["accuracy"])))

    def forget(self) -> None:
        """Before the file is read anew: a resume makes it shorter."""
        self.step, self.seconds, self.reward, self.evaluated, self.recent = 0, 0.0, None, [], []


class MetricsFollower:
    """Reads what a run has added to its metrics.jsonl since the last look.

    Args:
        progress: learns from it.
    """

    def __init__(self, progress: RunProgress) -> None:
        self.progress = progress
        self.file: Path = progress.run.folder / "metrics.jsonl"
        self._read, self._id = 0, -1

    def look(self) -> list[dict[str, Any]]:
        """The new records; a line that is not whole yet waits for the next look. A rewound file (a resume) is read from
        its beginning."""
        try:
            facts = self.file.stat()
            if facts.st_size < self._read or facts.st_ino != self._id:
                self.progress.forget()
                self._read, self._id = 0, facts.st_ino
            if facts.st_size == self._read:
                return []
            with self.file.open("rb") as file:
                file.seek(self._read)
                content = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        records = []
        for line in whole.splitlines():
            try:
                record = json.loads(line)
            except (
                ValueError
            ):  # damaged: the run itself says so when it resumes, and `compare` when it reads the folder
                continue
            if isinstance(record, dict):
                self.progress.take(record)
                records.append(record)
        return records
