"""Selects a subset of tokens, independent of their order: no positions, no random state."""

import torch
from torch import Tensor

from proxima.data.random import finalize


def value_hash(*values: Tensor) -> Tensor:
    """[N] int64, a pseudo-random function of the values alone, of the bits of each through `finalize`. Sorting by it
    is a shuffle that does not depend on the order of the tokens."""
    mixed = torch.zeros(values[0].shape, dtype=torch.int64, device=values[0].device)
    for value in values:
        mixed = finalize(mixed ^ value.detach().double().contiguous().view(torch.int64))
    return mixed


def smallest_tokens(keys: Tensor, mask: Tensor, count: int, ties: Tensor | None = None) -> Tensor:
    """[N] bool: the `count` tokens of the mask with the smallest keys, or all if there are fewer. Equal keys are
    ordered by `ties`, or else by position."""
    chosen = torch.zeros_like(mask)
    tokens = mask.nonzero().flatten()
    if ties is not None:
        tokens = tokens[ties[tokens].argsort(stable=True)]
    chosen[tokens[keys[tokens].argsort(stable=True)[:count]]] = True
    return chosen


def second_moment_keep(squares: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """[N] bool: without the tokens of the largest `squares`, until the mean of the rest is below `threshold`; at least
    one is kept."""
    tokens = mask.nonzero().flatten()
    ordered, order = squares[tokens].detach().double().sort(stable=True)
    running_mean = ordered.cumsum(0) / torch.arange(1, len(tokens) + 1, device=tokens.device)  # ascending
    keep = torch.zeros_like(mask)
    keep[tokens[order[: max(1, int((running_mean < threshold).sum()))]]] = True
    return keep
