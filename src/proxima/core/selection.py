"""Selection: which completions go on to the update. Specs are applied in order; each sees only what those before it
kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from proxima.core.advantage import GroupStatistics
from proxima.core.spec import Spec
from proxima.core.token_subset import value_hash
from proxima.data import Outcomes, require


class Selection(Spec, Protocol):
    """A frozen dataclass; calling it gives [S] bool, True for the completions that are kept. Subclass it to get the
    defaults.

    reason: names its drops in logs.
    local: the decision on a group depends on that group alone. While dynamic sampling fills a batch, it asks the local
        specs before the first other one which groups are worth keeping.
    """

    reason: ClassVar[str]

    @property
    def local(self) -> bool:
        return False

    def prompts_factor(self, size: int) -> int:
        """How many times as many prompts a step takes, with groups of `size`, because of this spec."""
        return 1

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class DropUniformGroups(Selection):
    """Drop the groups whose valid rewards are all equal: their group-relative advantages are 0 and teach nothing.

    Args:
        metric: what has to differ: `reward` (or `score`), `accuracy` (or `acc`), `length`, `truncated`, or a reward by
            its name. With a shaped reward (a length penalty beside the accuracy) `reward` differs in nearly every
            group; `accuracy` is what DAPO means.
        outcomes: rewards, validity, groups.
        advantage: [S], not looked at.
    Returns: [S] bool, False for every completion of such a group.
    Edge cases: uniform is max == min over the valid completions whose metric is known, never a small standard
        deviation; a group with fewer than two is uniform; so is one of which the metric is not known.
    Source: dynamic sampling of DAPO, arXiv 2503.14476, Eq. 11.
    """

    metric: str = "reward"
    reason: ClassVar[str] = "uniform_group"
    local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(
            bool(self.metric.strip()),
            "metric",
            self.metric,
            "must be reward, accuracy, length, truncated or the name of a reward",
        )

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        value = outcomes.metric(self.metric)
        valid = outcomes.valid & value.isfinite()
        return ~GroupStatistics.of(replace(outcomes, reward=value, valid=valid)).uniform


@dataclass(frozen=True)
class DropTruncated(Selection):
    """Drop completions that hit the length limit: their reward says little about what they would have become.

    Args: outcomes: `truncated`. advantage: not looked at. Returns: [S] bool.
    Edge cases: they have entered the group's mean before: advantages are of the full group. Source: overlong filtering,
        DAPO 2503.14476.
    """

    reason: ClassVar[str] = "truncated"
    local: ClassVar[bool] = True

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        return ~outcomes.truncated


@dataclass(frozen=True)
class Prune(Selection):
    """Keep only the completions whose advantage says most: a gradient from few completions for the price of few.

        k = max(1, floor(G (1 - rate) + 1e-9)) of G, in the stable order (-|A|, index)

    Args:
        rate: share to drop, in [0, 1).
        keep: `largest` |A| (the method; the original's flag says `smallest`, after what it removes), `smallest` |A|, or
            `random`.
        scope: the G are a `group`, or the whole `batch`.
        count: `keep`, the k above, or `drop`: k = max(1, G - floor(G rate)), the original trainer's rule; they differ
            where G rate is no integer (C2).
        allocate: dynamic completion allocation: the loop takes floor(G / k) times as many prompts a step (in the scope
            of the batch floor(1 / (1 - rate)) times), so that an update keeps its size in completions. Nothing changes
            here.
        outcomes: groups. advantage: [S], of the full group.
    Returns: [S] bool. Raises: ValueError naming field, value and bound, at construction.
    Edge cases: a group of one is kept. G counts valid completions. `random` depends on `outcomes.identity` alone
        (prompt uid and sample; the position where there is none): not on the rewards, and not on a random state.
    Source: CPPO (completion pruning), arXiv 2503.22342. Differs: the original ranks the local batch, which is one group
        or several (C2), and after pruning its normaliser counts kept completions only (C3), as here, since dropped ones
        are never packed.
    """

    rate: float = 0.5
    keep: Literal["largest", "smallest", "random"] = "largest"
    scope: Literal["group", "batch"] = "group"
    count: Literal["keep", "drop"] = "keep"
    allocate: bool = False
    reason: ClassVar[str] = "pruned"

    def __post_init__(self) -> None:
        require(0 <= self.rate < 1, "rate", self.rate, "must be in [0, 1)")
        require(
            self.keep in ("largest", "smallest", "random"), "keep", self.keep, "must be largest, smallest or random"
        )
        require(self.scope in ("group", "batch"), "scope", self.scope, "must be group or batch")
        require(self.count in ("keep", "drop"), "count", self.count, "must be keep or drop")

    @property
    def local(self) -> bool:
        return self.scope == "group"

    def kept(self, size: int) -> int:
        """k, how many of `size` completions are kept."""
        if self.count == "drop":
            return max(1, size - math.floor(size * self.rate + 1e-9))
        return max(1, math.floor(size * (1 - self.rate) + 1e-9))

    def prompts_factor(self, size: int) -> int:
        """How many times as many prompts an update may take, with groups of `size`: floor(G / k) under `allocate`, else
        1.

        In the scope of the batch a group has no k of its own: floor(1 / (1 - rate)).
        """
        if not self.allocate:
            return 1
        return size // self.kept(size) if self.scope == "group" else math.floor(1 / (1 - self.rate) + 1e-9)

    def keeps_size(self, size: int) -> bool:
        """True where `prompts_factor` times as many groups of `size` leave exactly as many completions as there were
        without pruning."""
        if self.scope == "group":
            return self.prompts_factor(size) * self.kept(size) == size
        return abs(self.prompts_factor(size) * (1 - self.rate) - 1) < 1e-9

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        index = (
            GroupStatistics.of(outcomes).index
            if self.scope == "group"
            else torch.zeros_like(outcomes.group, dtype=torch.long)
        )
        position = torch.arange(len(index), device=index.device)
        size = advantage.abs().double()
        identity = position if outcomes.identity is None else outcomes.identity
        key = {"largest": -size, "smallest": size, "random": value_hash(identity)}[self.keep]
        order = key.argsort(stable=True)
        order = order[index[order].argsort(stable=True)]
        total = torch.bincount(index)
        rank = torch.empty_like(index)
        rank[order] = position - (total.cumsum(0) - total)[index[order]]
        limit = torch.tensor([self.kept(n) for n in total.tolist()], dtype=torch.long, device=index.device)
        return rank < limit[index]


@dataclass(frozen=True)
class Balance(Selection):
    """As many completions with a positive as with a negative advantage: drop those of the commoner sign with the
    smallest |A|.

    Args:
        scope: balance each `group` or the whole `batch`.
        most: ratio of the commoner to the rarer sign that is allowed, >= 1.
        outcomes: groups. advantage: [S].
    Returns: [S] bool. Raises: ValueError at construction.
    Edge cases: where one sign is absent there is nothing to balance and all stay; an advantage of exactly 0 always
        stays. Ties by index.
    """

    scope: Literal["group", "batch"] = "batch"
    most: float = 1.0
    reason: ClassVar[str] = "unbalanced"

    def __post_init__(self) -> None:
        require(self.scope in ("group", "batch"), "scope", self.scope, "must be group or batch")
        require(self.most >= 1, "most", self.most, "must be >= 1")

    @property
    def local(self) -> bool:
        return self.scope == "group"

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        index = (
            GroupStatistics.of(outcomes).index
            if self.scope == "group"
            else torch.zeros_like(outcomes.group, dtype=torch.long)
        )
        keep = torch.ones_like(outcomes.valid)
        for sign in (1, -1):
            own, other = (advantage * sign > 0).long(), (advantage * sign < 0).long()
            rarer = torch.zeros_like(index).index_add(0, index, other)[index]
            # Rank among the completions of the same group and sign, largest |A| first.
            order = torch.where(own.bool(), -advantage.abs().double(), torch.inf).argsort(stable=True)
            order = order[index[order].argsort(stable=True)]
            total = torch.bincount(index, minlength=1)
            rank = torch.empty_like(index)
            rank[order] = torch.arange(len(index), device=index.device) - (total.cumsum(0) - total)[index[order]]
            keep &= ~(own.bool() & (rarer > 0) & (rank >= torch.floor(rarer * self.most)))
        return keep


def select(specs: Sequence[Selection], outcomes: Outcomes, advantage: Tensor) -> tuple[Tensor, list[str | None]]:
    """Apply the specs in order.

    Args:
        specs: each sees only the completions that those before it kept.
        outcomes: S completions; invalid ones are dropped first, for the reason "invalid".
        advantage: [S].
    Returns: keep [S] bool, and for each completion why it was dropped (None: kept). `collections.Counter(reasons)`
        counts them.
    """
    keep = outcomes.valid.clone()
    reasons: list[str | None] = [None if valid else "invalid" for valid in keep.tolist()]
    for spec in specs:
        rows = keep.nonzero().flatten()
        stays = spec(outcomes.take(rows), advantage[rows])
        for row in rows[~stays].tolist():
            reasons[row] = spec.reason
        keep[rows] = stays
    return keep, reasons


def prompts_factor(specs: Sequence[Selection], size: int) -> int:
    """How many times as many prompts a step takes, with groups of `size`: pruning with `allocate` fills the places that
    it frees."""
    return math.prod(spec.prompts_factor(size) for spec in specs)


SELECTIONS: dict[str, type] = {
    "balance": Balance,
    "drop_truncated": DropTruncated,
    "drop_uniform_groups": DropUniformGroups,
    "prune": Prune,
}
