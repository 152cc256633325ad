"""What rank 0 sends the other ranks. Each message says what every rank does next; `placement.follower` does it there.

A message has values only: names of stacks and columns, trajectories with numpy columns, and the specs of a loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.core.metrics import Metrics
from proxima.data.trajectory import Trajectory
from proxima.training.objectives.protocol import Objective
from proxima.training.ranks import Message


@dataclass(frozen=True)
class Start(Message):
    """Read the data, compare them with those of the other nodes, and load the models, those of `checkpoint` if the run
    resumes from one."""

    folder: Path
    checkpoint: Path | None


@dataclass(frozen=True)
class OfStack(Message):
    """Calls a method of the stack with this name."""

    stack: str

    @property
    def target(self) -> str:
        return self.stack


@dataclass(frozen=True)
class Fill(OfStack):
    """Fill the columns of the stage that fills `column`, see `TrainStack.columns`."""

    column: str
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True)
class Update(OfStack):
    """`TrainStack.update` with these arguments."""

    objective: Objective[Any]
    updates: Sequence[Sequence[Any]]
    planned: int
    should_continue: Callable[[Sequence[Any], Metrics], bool] | None


class Gather(OfStack):
    """Send rank 0 the weights, see `TrainStack.gathered`."""


class Release(OfStack):
    """Return unused device memory, see `TrainStack.release`."""


class Stages(OfStack):
    """Create the late stages, see `TrainStack.late_stages`."""


@dataclass(frozen=True)
class Save(Message):
    """Begin the checkpoint of a step, see `ShardedWriter.write`."""

    folder: Path
    step: int


@dataclass(frozen=True)
class Finish(Message):
    """Wait for the checkpoint that is being written."""


@dataclass(frozen=True)
class End(Message):
    """End, with the outcome of the run."""

    outcome: Any
