"""Deals the items of an update to the ranks' shares and into micro-batches, so that no rank waits long for another.

FSDP gathers each layer on all ranks at once, so in micro-batch k every rank waits for the slowest. What is minimised is
the sum over k of the largest cost, not of the shares' totals alone: each share orders its micro-batches by their cost.

    cost of a token in context c = 1 + pair_cost · c        in tokens of a linear pass

A group pays its prompt once where it stays together. It is split where that costs less than the imbalance.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from proxima.data.trajectory import Trajectory
from proxima.model.micro_batch import Items, micro_batches, tokens_fed, tokens_laid_out

Cuts = list[list[int]]  # micro-batches, as indices of items

# A piece of a group costs at most this part of the mean share; 0: each item is a piece of its own.
PARTS = (1.0, 0.25, 0.125, 0.0625, 0.0)
FIXED = 0.03  # what a micro-batch costs whatever is in it (kernel launches, gathers), in parts of the budget


@dataclass(frozen=True)
class Piece:
    """Items that stay together: a group that shares its prompt, or a part of one.

    Args:
        items: their indices. cost: in tokens, see above. tokens: those that count towards the budget.
    """

    items: tuple[int, ...]
    cost: float
    tokens: int

    def joined(self, other: "Piece") -> "Piece":
        """Return both as one piece."""
        return Piece(self.items + other.items, self.cost + other.cost, self.tokens + other.tokens)


@dataclass(frozen=True)
class Work:
    """What the items of an update cost.

    Args:
        alone, after: each item, as the first of a piece, and as a later one, whose prompt has been run.
        groups: the items of each group, in order.
    """

    alone: Sequence[Piece]
    after: Sequence[Piece]
    groups: Sequence[Sequence[int]]

    def cost_of(self, items: Sequence[int]) -> float:
        """Return the cost of some items in this order."""
        joins = [False, *(self._are_neighbours(i, j) for i, j in pairwise(items))]
        return sum((self.after if join else self.alone)[i].cost for i, join in zip(items, joins, strict=False))

    def _are_neighbours(self, before: int, item: int) -> bool:
        return self._group_of[before] == self._group_of[item]

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {i: number for number, group in enumerate(self.groups) for i in group}


def work_of(items: Items, *, pair_cost: float = 0.0, share_prompt: bool = True) -> Work:
    """Return what items cost; see `deal`."""
    alone = [_piece(items, i, pair_cost, share_prompt) for i in range(len(items))]
    after = [_piece(items, i, pair_cost, share_prompt, joins=i > 0) for i in range(len(items))]
    return Work(alone, after, together(items, share_prompt=share_prompt))


def deal(items: Items, shares: int, budget: int, *, pair_cost: float = 0.0, share_prompt: bool = True) -> list[Cuts]:
    """Return the micro-batches of each share; a share may be empty.

    Args:
        items: the sequences of each item.
        budget: tokens of a micro-batch, as `micro_batches` counts them; a single item above it gets one of its own.
        pair_cost: of one token's attention to one other, see `PackedModel.pair_cost`.
        share_prompt: neighbours of a group run their prompt once.
    """
    work = work_of(items, pair_cost=pair_cost, share_prompt=share_prompt)
    whole = sum(work.cost_of(group) for group in work.groups)
    best, least = [list[list[int]]() for _ in range(shares)], math.inf
    for part in PARTS:
        pieces = pieces_of(work, part * whole / shares, budget)
        cuts = in_micro_batches(pieces, shares, budget)
        cost = cost_of_passes(cuts) + FIXED * budget * max(map(len, cuts))
        if cost < least:
            best, least = [[items_of(cut) for cut in own] for own in cuts], cost
    return best


def together(items: Items, *, share_prompt: bool) -> list[list[int]]:
    """Return the items of each group whose prompt is run once, or each item alone."""
    groups: list[list[int]] = []
    for i, sequences in enumerate(items):
        joins = share_prompt and i > 0 and items[i - 1][-1].group == sequences[0].group
        if joins:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _piece(items: Items, i: int, pair_cost: float, share_prompt: bool, *, joins: bool = False) -> Piece:
    """Return an item as a piece; if it `joins`, without what it shares with the item before it."""
    own, before = [items[i]], [items[i - 1]] if joins else []
    fed = tokens_fed([*before, *own], share_prompt=share_prompt) - tokens_fed(before, share_prompt=share_prompt)
    group = before[-1][-1].group if joins else None
    tokens = tokens_laid_out(items[i], share_prompt, group)
    return Piece((i,), fed + pair_cost * pairs(items[i], share_prompt, group), tokens)


def pairs(sequences: Sequence[Trajectory], share_prompt: bool, group: int | None) -> float:
    """Return how many pairs of tokens attend to each other in an item, after a sequence of `group`: each token attends
    to those before it."""
    total = 0.0
    for trajectory in sequences:
        prompt, response = len(trajectory.prompt_tokens), max(0, len(trajectory.tokens) - 1)
        if not (share_prompt and trajectory.group == group):
            total += prompt * prompt / 2
        total += response * prompt + response * response / 2
        group = trajectory.group
    return total


def pass_sizes(items: Items, *, share_prompt: bool) -> tuple[int, int, float]:
    """Return the tokens that a micro-batch of these items feeds to the model, those that it predicts, and the pairs of
    tokens that attend to each other."""
    rows, attended, group = 0, 0.0, None
    for sequences in items:
        rows += sum(len(trajectory.tokens) for trajectory in sequences)
        attended += pairs(sequences, share_prompt, group)
        group = sequences[-1].group
    return tokens_fed(items, share_prompt=share_prompt), rows, attended


def pieces_of(work: Work, limit: float, budget: int) -> list[Piece]:
    """Return the groups, cut into pieces that cost at most `limit` and fit into a micro-batch, where an item does."""
    pieces = []
    for first, *rest in work.groups:
        begun = work.alone[first]
        for i in rest:
            longer = begun.joined(work.after[i])
            if longer.cost > limit or longer.tokens > budget:
                pieces.append(begun)
                begun = work.alone[i]
            else:
                begun = longer
        pieces.append(begun)
    return pieces


def in_micro_batches(pieces: Sequence[Piece], shares: int, budget: int) -> list[list[list[Piece]]]:
    """Return the micro-batches of each share, as few as fit. In each of them the shares have about the same cost."""
    count = max(1, math.ceil(sum(piece.tokens for piece in pieces) / budget / shares))
    while (filled := _filled(pieces, shares * count, budget)) is None:
        count += 1
    filled.sort(key=cost_of, reverse=True)
    dealt = [list[list[Piece]]() for _ in range(shares)]
    for first in range(0, len(filled), shares):
        ahead = sorted(range(shares), key=lambda share: sum(map(cost_of, dealt[share])))
        for share, cut in zip(ahead, filled[first : first + shares], strict=False):
            if cut:
                dealt[share].append(cut)
    return dealt


def _filled(pieces: Sequence[Piece], count: int, budget: int) -> list[list[Piece]] | None:
    """Return `count` micro-batches of about the same cost, the most expensive pieces first, each into the cheapest that
    has room for it; None if they do not fit."""
    cuts = [list[Piece]() for _ in range(count)]
    tokens = [0] * count
    cheapest = [(0.0, number) for number in range(count)]  # a heap
    for piece in sorted(pieces, key=lambda piece: -piece.cost):
        full = []
        while cheapest:
            cost, number = heapq.heappop(cheapest)
            if not cuts[number] or tokens[number] + piece.tokens <= budget:
                break
            full.append((cost, number))
        else:
            return None
        cuts[number].append(piece)
        tokens[number] += piece.tokens
        for entry in [*full, (cost + piece.cost, number)]:
            heapq.heappush(cheapest, entry)
    return cuts


def cost_of(pieces: Sequence[Piece]) -> float:
    return sum(piece.cost for piece in pieces)


def cost_of_passes(cuts: Sequence[Sequence[Sequence[Piece]]]) -> float:
    """Return the sum over micro-batches of the cost of the most expensive share."""
    costs = [list(map(cost_of, own)) for own in cuts]
    passes = max(map(len, costs), default=0)
    return sum(max(own[k] for own in costs if k < len(own)) for k in range(passes))


def items_of(pieces: Sequence[Piece]) -> list[int]:
    """Return the items of some pieces, those of a group together."""
    return sorted(i for piece in pieces for i in piece.items)


def cuts_of_shares(
    items: Items, shares: int, budget: int, *, pair_cost: float = 0.0, share_prompt: bool = True
) -> list[Cuts]:
    """Return the micro-batches of each share. A single one keeps the order of the items."""
    if shares == 1:
        return [micro_batches(items, budget, share_prompt=share_prompt)]
    return deal(items, shares, budget, pair_cost=pair_cost, share_prompt=share_prompt)
