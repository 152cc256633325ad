"""Deals the items of an update to the ranks' shares and into micro-batches, so that no rank waits long for another.

FSDP gathers each layer on all ranks at once, so in micro-batch k every rank waits for the slowest. What is minimised is
the sum over k of the largest cost, not of the shares' totals alone: each share orders its micro-batches by their cost.

    cost of a token in context c = 1 + pair_cost · c        in tokens of a linear pass

A group pays its prompt once where it stays together. It is split where that costs less than the imbalance: pieces of
groups are dealt, the most expensive first, and then items change places, see `exchange`.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from proxima.data.trajectory import Trajectory
from proxima.model.micro_batch import Items, micro_batches, tokens_fed, tokens_laid_out
from proxima.training.exchange import Prices, evened

Cuts = list[list[int]]  # micro-batches, as indices of items

# A piece of a group costs at most this part of the mean share; 0: each item is a piece of its own.
PARTS = (1.0, 0.25, 0.125, 0.0625, 0.0)
FIXED = 0.03  # what a micro-batch costs whatever is in it (kernel launches, gathers), in parts of the budget


@dataclass(frozen=True)
class ItemPiece:
    """Items that stay together: a group that shares its prompt, or a part of one.

    Args:
        items: their indices. cost: in tokens, see above. tokens: those that count towards the budget.
    """

    items: tuple[int, ...]
    cost: float
    tokens: int

    def joined(self, other: "ItemPiece") -> "ItemPiece":
        """Return both as one piece."""
        return ItemPiece(self.items + other.items, self.cost + other.cost, self.tokens + other.tokens)


@dataclass(frozen=True)
class Work:
    """What the items of an update cost.

    Args:
        alone, after: each item, as the first of a piece, and as a later one, whose prompt has been run.
        groups: the items of each group, in order.
    """

    alone: Sequence[ItemPiece]
    after: Sequence[ItemPiece]
    groups: Sequence[Sequence[int]]

    def cost_of(self, items: Sequence[int]) -> float:
        """Return the cost of some items in this order."""
        total = 0.0
        before: int | None = None
        for i in items:
            piece = self.alone[i]
            if before is not None and self._group_of[before] == self._group_of[i]:
                piece = self.after[i]
            total += piece.cost
            before = i
        return total

    def costs_of(self, cuts: Iterable[Sequence[int]]) -> list[float]:
        """Return the cost of each micro-batch."""
        return [self.cost_of(cut) for cut in cuts]

    @cached_property
    def prices(self) -> Prices:
        """The same for items in any order: what all items of a group share is its opening. Group 0 is that of items
        which share nothing."""
        groups = np.zeros(len(self.alone), np.int64)
        opening_costs = [0.0]
        opening_tokens = [0]
        for first, *later in self.groups:
            if later:
                groups[[first, *later]] = len(opening_costs)
                opening_costs.append(min(self.alone[i].cost - self.after[i].cost for i in later))
                opening_tokens.append(min(self.alone[i].tokens - self.after[i].tokens for i in later))
        opening_cost = np.array(opening_costs)
        opening_size = np.array(opening_tokens)
        costs = np.array([piece.cost for piece in self.alone]) - opening_cost[groups]
        tokens = np.array([piece.tokens for piece in self.alone]) - opening_size[groups]
        return Prices(costs, tokens, groups, opening_cost, opening_size)

    @cached_property
    def _group_of(self) -> dict[int, int]:
        numbers: dict[int, int] = {}
        for number, group in enumerate(self.groups):
            numbers |= dict.fromkeys(group, number)
        return numbers


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
    best: Cuts = []
    least = math.inf
    for part in PARTS:
        pieces = pieces_of(work, part * whole / shares, budget)
        cuts = in_micro_batches(pieces, shares, budget)
        cost = cost_of_passes(work.costs_of(cuts), shares) + FIXED * budget * len(cuts) / shares
        if cost < least:
            best = cuts
            least = cost

    # what paths of an episode share beside their prompt has no price, so an exchange may lose it
    exchanged = evened(work.prices, best, shares, budget)
    cuts = min(best, exchanged, key=lambda cuts: cost_of_passes(work.costs_of(cuts), shares))
    return in_turn(cuts, work.costs_of(cuts), shares)


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


def _piece(items: Items, i: int, pair_cost: float, share_prompt: bool, *, joins: bool = False) -> ItemPiece:
    """Return an item as a piece; if it `joins`, without what it shares with the item before it."""
    before: Items = []
    group = None
    if joins:
        before = [items[i - 1]]
        group = items[i - 1][-1].group
    fed = tokens_fed([*before, items[i]], share_prompt=share_prompt) - tokens_fed(before, share_prompt=share_prompt)
    tokens = tokens_laid_out(items[i], share_prompt, group)
    return ItemPiece((i,), fed + pair_cost * pairs(items[i], share_prompt, group), tokens)


def pairs(sequences: Sequence[Trajectory], share_prompt: bool, group: int | None) -> float:
    """Return how many pairs of tokens attend to each other in an item, after a sequence of `group`: each token attends
    to those before it."""
    total = 0.0
    for trajectory in sequences:
        prompt = len(trajectory.prompt_tokens)
        response = max(0, len(trajectory.tokens) - 1)
        if not (share_prompt and trajectory.group == group):
            total += prompt * prompt / 2
        total += response * prompt + response * response / 2
        group = trajectory.group
    return total


def pass_sizes(items: Items, *, share_prompt: bool) -> tuple[int, int, float]:
    """Return the tokens that a micro-batch of these items feeds to the model, those that it predicts, and the pairs of
    tokens that attend to each other."""
    rows = 0
    attended = 0.0
    group = None
    for sequences in items:
        rows += sum(len(trajectory.tokens) for trajectory in sequences)
        attended += pairs(sequences, share_prompt, group)
        group = sequences[-1].group
    return tokens_fed(items, share_prompt=share_prompt), rows, attended


def pieces_of(work: Work, limit: float, budget: int) -> list[ItemPiece]:
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


def in_micro_batches(pieces: Sequence[ItemPiece], shares: int, budget: int) -> Cuts:
    """Return the items of micro-batches, as many for each share and as few as fit, some of which may be empty. They
    have about the same cost."""
    count = max(1, math.ceil(sum(piece.tokens for piece in pieces) / budget / shares))
    while (filled := _filled(pieces, shares * count, budget)) is None:
        count += 1
    return [sorted(i for piece in cut for i in piece.items) for cut in filled]


def in_turn(cuts: Cuts, costs: Sequence[float], shares: int) -> list[Cuts]:
    """Return the micro-batches of each share: in each pass as many of the most expensive ones that are left, of which
    the share with least so far has the first."""
    order = sorted(range(len(cuts)), key=lambda number: -costs[number])
    dealt = [Cuts() for _ in range(shares)]
    total = [0.0] * shares
    for first in range(0, len(cuts), shares):
        ahead = sorted(range(shares), key=lambda share: total[share])
        for share, number in zip(ahead, order[first : first + shares], strict=False):
            if cuts[number]:
                dealt[share].append(cuts[number])
                total[share] += costs[number]
    return dealt


def _filled(pieces: Sequence[ItemPiece], count: int, budget: int) -> list[list[ItemPiece]] | None:
    """Return `count` micro-batches of about the same cost, the most expensive pieces first, each into the cheapest that
    has room for it; None if they do not fit."""
    cuts = [list[ItemPiece]() for _ in range(count)]
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


def cost_of_passes(costs: Iterable[float], shares: int) -> float:
    """Return the sum over passes of the most expensive of as many micro-batches as there are shares."""
    return sum(sorted(costs, reverse=True)[::shares])


def cuts_of_shares(
    items: Items, shares: int, budget: int, *, pair_cost: float = 0.0, share_prompt: bool = True
) -> list[Cuts]:
    """Return the micro-batches of each share. A single one keeps the order of the items."""
    if shares == 1:
        return [micro_batches(items, budget, share_prompt=share_prompt)]
    return deal(items, shares, budget, pair_cost=pair_cost, share_prompt=share_prompt)
