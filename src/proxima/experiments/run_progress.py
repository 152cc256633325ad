"""The progress of a run in a sweep, from its metrics.jsonl while that grows."""

from dataclasses import dataclass, field
from enum import StrEnum

from proxima.data import UserError
from proxima.experiments.growing_records import GrowingRecords
from proxima.experiments.run_reader import Metrics, Points
from proxima.experiments.sweep_plan import PlannedRun
from proxima.runtime.watch.observer import Record
from proxima.runtime.watch.pace import seconds_left


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
        return train[-1].get("reward/mean") if train else None

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
