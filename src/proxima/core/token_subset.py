"""Choosing a few of many tokens, the same ones whatever their order: no positions, no random state."""

import torch
from torch import Tensor

from proxima.data.random import finalize


def value_hash(*values: Tensor) -> Tensor:
    """[N] int64, pseudo-random and a function of the values alone: the order of tokens by it is a shuffle that no
    permutation changes.

    The bits of each value go through `finalize` in turn. Equal values have equal hashes.
    """
    mixed = torch.zeros(values[0].shape, dtype=torch.int64, device=values[0].device)
    for value in values:
        mixed = finalize(mixed ^ value.detach().double().contiguous().view(torch.int64))
    return mixed


def smallest(keys: Tensor, mask: Tensor, count: int, ties: Tensor | None = None) -> Tensor:
    """[N] bool: the `count` tokens of the mask with the smallest keys (all of them if there are fewer). Of equal keys
    those with the smallest `ties` come first; without, in order of position."""
    chosen = torch.zeros_like(mask)
    rows = mask.nonzero().flatten()
    if ties is not None:
        rows = rows[ties[rows].argsort(stable=True)]
    chosen[rows[keys[rows].argsort(stable=True)[:count]]] = True
    return chosen


def second_moment_keep(squares: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """[N] bool: drop the tokens with the largest `squares` until the mean of those left is below `threshold`; at least
    one is kept."""
    rows = mask.nonzero().flatten()
    ordered, order = squares[rows].detach().double().sort(stable=True)
    below = (
        ordered.cumsum(0) / torch.arange(1, len(rows) + 1, device=rows.device) < threshold
    )  # running means of the smallest: ascending
    keep = torch.zeros_like(mask)
    keep[rows[order[: max(1, int(below.sum()))]]] = True
    return keep
