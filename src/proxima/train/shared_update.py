"""One update as the ranks see it: the items that are run, and this rank's share of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from proxima.data import Trajectory
from proxima.train.objectives.protocol import FirstForward, TokenStatistics


@dataclass(frozen=True, kw_only=True)
class SharedUpdate:
    """The items of an update that are run; the same on every rank but for `own`.

    Args:
        items: in the order in which they are packed, without those that add nothing.
        sequences: of each item.
        skipped: the number of items for which `Objective.skippable` saves the forward pass.
        own: indices of this rank's items, in order.
    """

    items: Sequence[Any]
    sequences: Sequence[Sequence[Trajectory]]
    skipped: int
    own: Sequence[int]

    def by_item(
        self, cuts: Sequence[Sequence[int]], statistics: Sequence[TokenStatistics]
    ) -> dict[int, list[TokenStatistics]]:
        """The statistics of this rank's items by index, from those of all sequences in the order of the `cuts`; empty
        lists if the objective gives none."""
        rest = iter(statistics)
        return {i: list(islice(rest, len(self.sequences[i]))) for cut in cuts for i in cut}

    def in_order(self, by_item: Mapping[int, list[TokenStatistics]]) -> FirstForward:
        """The trajectories with their statistics, in the order of the items."""
        pairs = ((self.sequences[i], by_item[i]) for i in sorted(by_item))
        return [pair for sequences, measured in pairs for pair in zip(sequences, measured, strict=False)]
