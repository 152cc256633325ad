"""What each rank computes of a call of `TrainStack.update`, and what rank 0 knows of the whole call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxima.core.metrics import Metrics
from proxima.data import Trajectory
from proxima.train.objectives.protocol import FirstForward, Objective, TokenStatistics


@dataclass(frozen=True, eq=False)
class Occurrence:
    """An item of an update, with its sequences; an item that an update has twice has two occurrences."""

    item: Any
    sequences: Sequence[Trajectory]

    @property
    def has_tokens(self) -> bool:
        return any(len(trajectory.tokens) for trajectory in self.sequences)


@dataclass
class UpdateShare:
    """What a rank computes of a call of `TrainStack.update`: its items of each update that are run."""

    objective: Objective[Any]
    updates: Sequence[Sequence[Any]]
    judged: bool = False  # rank 0 decides after each update whether there is another
    planned: int = 0  # updates that the schedule counts for the call, where fewer are made


@dataclass
class WholeUpdate:
    """What rank 0 alone knows of the call."""

    updates: Sequence[Sequence[Any]]
    run: Sequence[Sequence[Occurrence]]  # of each update, those that are not skipped
    parts: Sequence[Sequence[Sequence[int]]]  # of each update and rank, its places in `run`
    report: Callable[[int, int], None] | None
    should_continue: Callable[[Sequence[Any], Metrics], bool] | None
    before_first: Callable[[FirstForward], None] | None


def in_order(
    run: Sequence[Occurrence], parts: Sequence[Sequence[int]], everywhere: Sequence[Sequence[TokenStatistics]]
) -> list[tuple[Trajectory, TokenStatistics]]:
    """The statistics of all ranks with their trajectories, in the order of the items."""
    by_place: dict[int, list[tuple[Trajectory, TokenStatistics]]] = {}
    for places, statistics in zip(parts, everywhere, strict=True):
        rest = iter(statistics)
        for place in places:
            by_place[place] = list(zip(run[place].sequences, rest, strict=False))
    return [pair for place in sorted(by_place) for pair in by_place[place]]
