"""The share of each rank in a call of `TrainStack.update`, and rank 0's view of the whole call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from proxima.core.metrics import Metrics
from proxima.data import Trajectory
from proxima.train.objectives.protocol import FirstForward, Objective, TokenStatistics


@dataclass(frozen=True, eq=False)
class Occurrence:
    """An item of an update, with its sequences; an item that occurs twice in an update has two occurrences."""

    item: Any
    sequences: Sequence[Trajectory]

    @property
    def has_tokens(self) -> bool:
        return any(len(trajectory.tokens) for trajectory in self.sequences)


@dataclass
class UpdateShare:
    """The share of a rank in a call of `TrainStack.update`: its items of each update that are run."""

    objective: Objective[Any]
    updates: Sequence[Sequence[Any]]
    judged: bool = False  # rank 0 decides after each update whether another follows
    planned: int = 0  # updates that the schedule counts for the call, if fewer are made


@dataclass
class WholeUpdate:
    """The state of the call that only rank 0 has."""

    updates: Sequence[Sequence[Any]]
    run: Sequence[Sequence[Occurrence]]  # for each update, the items that are not skipped
    parts: Sequence[Sequence[Sequence[int]]]  # for each update and share, its places in `run`
    report: Callable[[int, int], None] | None
    should_continue: Callable[[Sequence[Any], Metrics], bool] | None
    before_first: Callable[[FirstForward], None] | None


def by_occurrence(
    run: Sequence[Occurrence], cuts: Sequence[Sequence[Occurrence]], statistics: Sequence[TokenStatistics]
) -> list[list[TokenStatistics]]:
    """The statistics of each occurrence of `run`, from those of all sequences in the order of the `cuts`; empty lists
    if the objective gives none."""
    rest = iter(statistics)
    own = {each: list(islice(rest, len(each.sequences))) for cut in cuts for each in cut}
    return [own.get(each, []) for each in run]


def in_order(
    run: Sequence[Occurrence], parts: Sequence[Sequence[int]], everywhere: Sequence[Sequence[list[TokenStatistics]]]
) -> list[tuple[Trajectory, TokenStatistics]]:
    """The statistics of all ranks with their trajectories, in the order of the items."""
    by_place = {
        place: own
        for places, rank in zip(parts, everywhere, strict=True)
        for place, own in zip(places, rank, strict=True)
    }
    pairs = ((run[place].sequences, by_place[place]) for place in sorted(by_place))
    return [pair for sequences, own in pairs for pair in zip(sequences, own, strict=False)]
