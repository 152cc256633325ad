"""What the slowest share of an update computes, by the run's own dealing of lengths that are drawn."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from proxima.training.dealing import ItemPiece, in_micro_batches
from proxima.training.exchange import Prices, evened


class Slowest(NamedTuple):
    """What the most expensive share computes, summed over the micro-batches, in each of which all wait for it.

    Args:
        tokens, squares: over those of a mean share: tokens, and squared lengths. passes: micro-batches.
    """

    tokens: float
    squares: float
    passes: int


@lru_cache(maxsize=1024)  # layouts often have as many shares
def slowest(lengths: Sequence[float], shares: int, budget: int, pair_cost: float) -> Slowest:
    """Return what the slowest share computes.

    Each sequence is dealt by itself. The run's dealing keeps those of a group together where that is no worse.

    Args:
        lengths: tokens of the sequences. budget: tokens of a micro-batch.
        pair_cost: of a token's attention to another one, see `deal`.
    """
    tokens = sum(lengths)
    squares = sum(length * length for length in lengths)
    if shares == 1:
        return Slowest(1.0, 1.0, max(1, math.ceil(tokens / max(budget, *lengths))))
    costs = np.array([length + pair_cost * length * length / 2 for length in lengths])
    sizes = np.round(lengths).astype(np.int64)
    pieces = [ItemPiece((i,), cost, size) for i, (cost, size) in enumerate(zip(costs, sizes, strict=True))]
    alone = Prices(costs, sizes, np.zeros_like(sizes), np.zeros(1), np.zeros(1, np.int64))
    cuts = evened(alone, in_micro_batches(pieces, shares, budget), shares, budget)
    longest = sorted(cuts, key=lambda cut: -costs[cut].sum())[::shares]
    own = [lengths[i] for i in chain.from_iterable(longest)]
    own_tokens = sum(own)
    own_squares = sum(length * length for length in own)
    passes = sum(map(bool, longest))
    return Slowest(own_tokens * shares / tokens, own_squares * shares / squares, passes)
