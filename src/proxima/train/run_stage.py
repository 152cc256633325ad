"""The interface of a stage that keeps state from step to step."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from proxima.data import Trajectory
from proxima.rollout.collector import Pending
from proxima.train.objectives.protocol import FirstForward


class RunStage(Protocol):
    """A stage whose state lasts as long as the run. It fills its column on the event loop, before the update, from data
    gathered in hooks of the engine's `Executor`, between two updates.

    column: the field of `Trajectory`, [T] float32, that it fills.
    """

    @property
    def column(self) -> str: ...

    async def fill(self, trajectories: Sequence[Trajectory], version: int) -> list[Trajectory]:
        """The trajectories of a step with the column, before their update from the weights of `version`."""
        ...

    def observe(self, first: FirstForward, version: int) -> None:
        """Called in the compute thread before the first optimizer step of an update from the weights of `version`, with
        the results of its forward passes."""

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the step that ends."""
        ...

    def warnings(self) -> list[str]:
        """Warnings for the user, each once."""
        ...

    def files(self, pending: Pending) -> Mapping[str, Callable[[Path], None]]:
        """The files for a checkpoint at this instant, each by name with the function that writes it; `pending` is what
        the collector holds for later steps. State that none of these will read is discarded."""
        ...
