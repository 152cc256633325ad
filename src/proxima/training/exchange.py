"""Evens out a deal: items of the most expensive micro-batches move to others, or change places with items of others.

Micro-batches are ordered by cost, and the shares run as many of them at once: pass k lasts as long as the most
expensive of these. An exchange makes one micro-batch cheaper and leaves the other one below the longest of its pass, so
the sum over passes falls. Of all such exchanges, those come first that bring both lowest and repeat fewest prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]  # float64 or int64

TOP = 8  # micro-batches of each pass, from the most expensive one, whose items are exchanged
ENOUGH = 2e-4  # of the sum over passes: what a round saves that is worth another one
PATIENCE = 3  # rounds in succession that save less, before it ends
CANDIDATES = 2_000_000  # exchanges compared in a round; with more, many items are in a micro-batch, and these are even


@dataclass(frozen=True)
class Prices:
    """What items cost in a micro-batch, n of them in G groups.

    Args:
        costs, tokens: [n] of each item, next to one of its group.
        groups: [n] its group.
        opening_costs, opening_tokens: [G] of a group in addition, once in each micro-batch with an item of it.
    """

    costs: Values
    tokens: Values
    groups: Values
    opening_costs: Values
    opening_tokens: Values


def evened(prices: Prices, cuts: Sequence[Sequence[int]], shares: int, budget: int) -> list[list[int]]:
    """Return as many micro-batches of the same items, whose sum over passes is the same or lower.

    Args:
        cuts: micro-batches, as indices of items. shares: that run as many of them at once.
        budget: tokens of a micro-batch; what is above it in one stays alone there.
    """
    if not len(prices.costs):
        return [list(cut) for cut in cuts]

    exchange = _Deal(prices, cuts, shares, budget)
    least = exchange.passes()
    patience = PATIENCE
    while patience and exchange.round():
        after = exchange.passes()
        if least - after > ENOUGH * least:
            patience = PATIENCE
        else:
            patience -= 1
        least = min(least, after)
    return [np.flatnonzero(exchange.place == number).tolist() for number in range(len(cuts))]


class _Deal:
    """The state: place [n] is the micro-batch of each item; members [cuts, G] counts items; costs, tokens [cuts]."""

    def __init__(self, prices: Prices, cuts: Sequence[Sequence[int]], shares: int, budget: int) -> None:
        self.prices = prices
        self.shares = shares
        self.budget = budget
        self.place = np.zeros(len(prices.costs), np.int64)
        self.members = np.zeros((len(cuts), len(prices.opening_costs)), np.int64)
        self.costs = np.zeros(len(cuts))
        self.tokens = np.zeros(len(cuts), np.int64)
        for number, cut in enumerate(cuts):
            self.place[list(cut)] = number
        self._count(range(len(cuts)))

    def passes(self) -> float:
        """Return the sum over passes of the most expensive micro-batch."""
        return float(np.sort(self.costs)[::-1][:: self.shares].sum())

    def round(self) -> int:
        """Make the best exchanges that concern different micro-batches; return how many."""
        order = np.argsort(-self.costs, kind="stable")
        longest = order[:: self.shares]
        ceilings = np.empty(len(order))
        ceilings[order] = np.repeat(self.costs[longest], self.shares)[: len(order)]
        top = order[np.arange(len(order)) % self.shares < TOP]
        items = np.flatnonzero(np.isin(self.place, top))
        if len(items) * (len(self.place) + len(order)) > CANDIDATES:
            return 0

        score = self._scores(items, ceilings)
        others = score.argmin(axis=1)
        best = score[np.arange(len(items)), others]
        own = self.place[items]
        gain = self.costs[own] - ceilings[own] - best
        first = np.isin(own, longest)

        touched = set[int]()
        made = 0
        for row in np.lexsort((-gain, ~first)):
            if not gain[row] > 1e-9 * self.costs[own[row]]:
                continue
            item = items[row]
            other = int(others[row])
            swapped = other - len(self.costs)
            there = other
            if swapped >= 0:
                there = int(self.place[swapped])
            here = int(own[row])
            if here in touched or there in touched:
                continue
            touched |= {here, there}
            self.place[item] = there
            if swapped >= 0:
                self.place[swapped] = here
            self._count((here, there))
            made += 1
        return made

    def _scores(self, items: Values, ceilings: Values) -> Values:
        """Return [items, cuts + n] the score of each exchange. The lowest is the best; infinity is no exchange.

            score = the most by which one of the two micro-batches exceeds the longest of its pass
                  + what the two cost more than before

        The first columns are the micro-batches to which an item can move; the others are the items with which it can
        change places."""
        prices = self.prices
        groups = self.prices.groups
        place = self.place
        here = place[items]
        own = groups[items]
        same = groups == own[:, None]
        closes = self.members[here, own] == 1
        opens = self.members.T[own] == 0  # [items, cuts]
        others_close = self.members[place, groups] == 1
        others_open = self.members[here][:, groups] == 0  # [items, n]

        def after(alone: Values, opening: Values, whole: Values) -> tuple[Values, Values]:
            """Of costs or of tokens: those of both micro-batches after each exchange."""
            leaves = alone[items] + opening[own] * closes
            enters = alone[items][:, None] + opening[own][:, None] * opens
            other_leaves = alone + opening[groups] * others_close
            other_enters = alone + opening[groups] * others_open
            change = alone - alone[items][:, None]
            given = whole[here][:, None] + np.where(same, change, other_enters - leaves[:, None])
            taken = whole[place] + np.where(same, -change, enters[:, place] - other_leaves)
            moved = np.broadcast_to((whole[here] - leaves)[:, None], enters.shape)
            return np.concatenate([moved, given], axis=1), np.concatenate([whole + enters, taken], axis=1)

        given, taken = after(prices.costs, prices.opening_costs, self.costs)
        given_tokens, taken_tokens = after(prices.tokens, prices.opening_tokens, self.tokens)
        target = np.concatenate([np.arange(len(self.costs)), place])
        allowed = (target != here[:, None]) & (given < self.costs[here][:, None]) & (taken < ceilings[target])
        allowed &= (given_tokens <= self.budget) & (taken_tokens <= self.budget)
        above = np.maximum(given - ceilings[here][:, None], taken - ceilings[target])
        added = given + taken - self.costs[here][:, None] - self.costs[target]
        return np.where(allowed, above + added, np.inf)

    def _count(self, cuts: Sequence[int]) -> None:
        """Add up what is in some micro-batches."""
        prices = self.prices
        for number in cuts:
            inside = np.flatnonzero(self.place == number)
            self.members[number] = np.bincount(prices.groups[inside], minlength=self.members.shape[1])
            opened = self.members[number] > 0
            self.costs[number] = prices.costs[inside].sum() + prices.opening_costs[opened].sum()
            self.tokens[number] = prices.tokens[inside].sum() + prices.opening_tokens[opened].sum()
