"""The shares of an update: which rank computes which items."""

from collections.abc import Sequence

from proxima.data.trajectory import Trajectory
from proxima.model.micro_batch import tokens_fed


def split(items: Sequence[Sequence[Trajectory]], shares: int, *, share_prompt: bool) -> list[list[int]]:
    """The indices of the items of each share, in order.

    The cost of an item is the number of tokens that it feeds to the model. Neighbours of one group, whose prompt is run
    once, stay together as a run; the most expensive run is assigned first, each to the share with the lowest cost so
    far. A share may be empty.

    Args:
        items: the sequences of each.
    """
    runs: list[list[int]] = []
    for i, sequences in enumerate(items):
        joins = share_prompt and i > 0 and items[i - 1][-1].group == sequences[0].group
        if joins:
            runs[-1].append(i)
        else:
            runs.append([i])
    costs = [tokens_fed([items[i] for i in run], share_prompt=share_prompt) for run in runs]
    load, parts = [0] * shares, [list[int]() for _ in range(shares)]
    for number in sorted(range(len(runs)), key=lambda number: -costs[number]):
        share = load.index(min(load))
        load[share] += costs[number]
        parts[share] += runs[number]
    return [sorted(part) for part in parts]
