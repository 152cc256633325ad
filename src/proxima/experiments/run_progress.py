"""The progress of a run in a sweep, from its metrics.jsonl while that grows; and the records of such a file, for
readers that ask again and again."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.experiments.run_reader import Metrics, Points
from proxima.experiments.sweep_plan import PlannedRun
from proxima.runtime.watch.observer import Record
from proxima.runtime.watch.step_notes import seconds_left
from proxima.system.jsonl import check_record, lines_from


class RunState(StrEnum):
    """State of a run in a sweep. Ctrl-C stops a run; the same command resumes it."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


LAST = 256  # bytes compared to detect a rewritten file


@dataclass(eq=False)
class GrowingRecords:
    """The records of metrics.jsonl as of the last `poll`."""

    file: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    end: int = 0
    last: bytes | None = b""  # the bytes before `end`; they differ if the file was rewritten. None: read it anew

    def poll(self) -> list[dict[str, Any]]:
        """Parse the lines that were appended since the last call and return their records; an incomplete line waits for
        the next call. A file that was rewritten, as by a resume, is read from its start.

        Raises:
            OSError: the file can't be read. UserError: a line of it is damaged; `records` has those before it.
        """
        with self.file.open("rb") as file:
            file.seek(self.end - len(self.last or b""))
            if self.last is None or file.read(len(self.last)) != self.last:
                self.records = []
                self.end = 0
            known = len(self.records)
            try:
                for record, end in lines_from(self.file, self.end):
                    check_record(record, self.file.name)
                    self.records.append(record)
                    self.end = end
            except UserError:
                self.last = None  # the line may be the rest of one, if the file was just rewritten
                raise
            file.seek(max(0, self.end - LAST))
            self.last = file.read(min(LAST, self.end))
        return self.records[known:]


@dataclass
class RunProgress:
    """Progress of a run."""

    run: PlannedRun
    state: RunState = RunState.WAITING
    metrics: Metrics = field(default_factory=Metrics)
    error: str | None = None  # why it failed, on one line
    before: bool = field(default=False, init=False)  # the run had ended before this sweep started
    _growing: GrowingRecords = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._growing = GrowingRecords(self.run.folder / "metrics.jsonl")

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.metrics.steps

    @property
    def seconds(self) -> float:
        """The training clock, without evaluations."""
        return self.metrics.total("time/step") or 0.0

    @property
    def reward(self) -> float | None:
        """The mean reward of the last step."""
        train = self.metrics.train
        if not train:
            return None
        value: float | None = train[-1].get("reward/mean")
        return value

    @property
    def evaluated(self) -> Points:
        """(step, figure) for each evaluation that has the figure."""
        return self.metrics.held_out()

    @property
    def remaining(self) -> float | None:
        """Seconds of training left, without evaluations; None before the first step."""
        if self.state is RunState.DONE:
            return 0.0
        return seconds_left(
            [seconds for _, seconds in self.metrics.curve("time/step")], max(self.run.steps - self.step, 0)
        )

    def poll(self) -> list[Record]:
        """Read what the run has appended to its metrics.jsonl since the last poll, and return the new records, up to a
        damaged line: the run reports it on resume, and `compare` when it reads the folder. A file that is missing has
        none."""
        known = len(self._growing.records)
        try:
            records: list[Record] = list(self._growing.poll())
        except (OSError, UserError):
            records = list(self._growing.records[known:])
        if records or not self._growing.records:  # a resume may have emptied the file
            self.metrics = Metrics.of(self._growing.records)
        return records
