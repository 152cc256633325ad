"""Selects a subset of tokens, independent of their order: no positions, no random state."""

import torch
from torch import Tensor

from proxima.core.sequence_rows import prefix_sums
from proxima.data.random import finalize


def value_hash(*values: Tensor) -> Tensor:
    """[N] int64, a pseudo-random function of the values alone: the bits of each, mixed by `finalize`. Sorting by it is
    a shuffle that does not depend on the order of the tokens."""
    mixed = torch.zeros(values[0].shape, dtype=torch.int64, device=values[0].device)
    for value in values:
        mixed = finalize(mixed ^ value.detach().double().contiguous().view(torch.int64))
    return mixed


def smallest_tokens(keys: Tensor, mask: Tensor, count: Tensor, ties: Tensor | None = None) -> Tensor:
    """[N] bool: the `count` [] int tokens of the mask with the smallest keys, or all if there are fewer. Equal keys are
    ordered by `ties`, or else by position."""
    order = torch.arange(len(mask), device=mask.device) if ties is None else ties.argsort(stable=True)
    order = order[keys[order].argsort(stable=True)]
    order = order[(~mask[order]).to(torch.uint8).argsort(stable=True)]  # tokens of the mask first
    return torch.zeros_like(mask).scatter(0, order, torch.arange(len(mask), device=mask.device) < count) & mask


def second_moment_keep(squares: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """[N] bool: the tokens of the mask without the largest `squares`, so many that the mean of the rest is below
    `threshold`; at least one is kept."""
    ordered, order = torch.where(mask, squares.detach().double(), torch.inf).sort(stable=True)
    place = torch.arange(len(mask), device=mask.device)
    inside = place < mask.sum()
    running_mean = prefix_sums(torch.where(inside, ordered, 0.0)[None])[0] / (place + 1)  # ascending
    kept = place < (inside & (running_mean < threshold)).sum().clamp(min=1)
    return torch.zeros_like(mask).scatter(0, order, kept) & mask
