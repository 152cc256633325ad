"""What the slowest share of an update computes, by the run's own dealing of lengths that are drawn."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from proxima.training.dealing import Piece, cost_of, in_micro_batches, items_of


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
    tokens, squares = sum(lengths), sum(length * length for length in lengths)
    if shares == 1:
        return Slowest(1.0, 1.0, max(1, math.ceil(tokens / max(budget, *lengths))))
    pieces = []
    for number, length in enumerate(lengths):
        cost = length + pair_cost * length * length / 2
        pieces.append(Piece((number,), cost, round(length)))
    cuts = in_micro_batches(pieces, shares, budget)
    own_tokens = own_squares = 0.0
    passes = max(map(len, cuts))
    for number in range(passes):
        most = max((own[number] for own in cuts if number < len(own)), key=cost_of)
        own_tokens += sum(lengths[i] for i in items_of(most))
        own_squares += sum(lengths[i] ** 2 for i in items_of(most))
    return Slowest(own_tokens * shares / tokens, own_squares * shares / squares, passes)
