"""The selections. They drop groups whose completions are alike, or truncated completions; or they keep part of a group,
by the size of its advantages, their sign, or the best and the worst."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.advantage.group import GroupStatistics, group_max, group_sum
from proxima.core.segment import value_hash
from proxima.core.selection.protocol import Selection
from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.outcomes import METRIC_ALIASES, Outcomes


@dataclass(frozen=True)
class DropUniformGroups(Selection):
    """Drop the groups whose valid rewards are all equal: their group-relative advantages are 0.

    Args:
        metric: the metric that has to differ: `reward` (or `score`), `accuracy` (or `acc`), `length`, `truncated`, or a
            reward by name. With a shaped reward (accuracy plus a length penalty) `reward` differs in nearly every
            group; `accuracy` is what DAPO means; a group in which no reward tells what is right is compared by
            `reward`.
        outcomes: rewards, validity, groups.
        advantage: [S], ignored.
    Returns: [S] bool, False for every completion of such a group.
    Edge cases: uniform means max == min over the valid completions whose metric is known, or fewer than two of them;
        the standard deviation is not used.
    Source: dynamic sampling of DAPO, arXiv 2503.14476, Eq. 11.
    """

    metric: str = "reward"
    reason: ClassVar[str] = "uniform_group"
    local: ClassVar[bool] = True

    @property
    def by_accuracy(self) -> bool:
        return METRIC_ALIASES.get(self.metric, self.metric) == "accuracy"

    def __post_init__(self) -> None:
        bound = "must be reward, accuracy, length, truncated or the name of a reward"
        require(bool(self.metric.strip()), "metric", self.metric, bound)

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        value = outcomes.metric(self.metric)
        if self.by_accuracy:
            index = outcomes.group.unique(return_inverse=True)[1]
            judged = group_sum((outcomes.valid & value.isfinite()).double(), index) > 0
            value = torch.where(judged, value, outcomes.reward.double())
        valid = outcomes.valid & value.isfinite()
        return ~GroupStatistics.of(replace(outcomes, reward=value, valid=valid)).uniform


@dataclass(frozen=True)
class DropTruncated(Selection):
    """Drop completions that hit the length limit: their reward says little about the unfinished answer.

    Args: outcomes: `truncated`. advantage: ignored. Returns: [S] bool.
    Edge cases: advantages are computed before, so the group's mean includes them. Source: overlong filtering, DAPO
        2503.14476.
    """

    reason: ClassVar[str] = "truncated"
    local: ClassVar[bool] = True

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        return ~outcomes.truncated


@dataclass(frozen=True)
class Prune(Selection):
    """Keep only the completions with the most informative advantages, so that the update costs less.

        k = max(1, floor(G (1 - rate) + 1e-9)) of G, in the stable order (-|A|, index)

    Args:
        rate: share to drop, in [0, 1).
        keep: `largest` |A| (the method; the original's flag, `smallest`, names what is removed), `smallest` |A|, or
            `random`.
        scope: G counts a `group`, or the whole `batch`.
        count: `keep`, the k above, or `drop`: k = max(1, G - floor(G rate)), the original trainer's rule; they differ
            if G rate is not an integer (C2).
        at_least: keep fewer where fewer differ: of the k, only those whose |A| is at least this share of the largest in
            the scope; in [0, 1], 0 keeps k.
        stop: stop the generation of completions that would be dropped whatever they are worth, see `StopRule`. Their
            rewards are missing from the mean of the group.
        reward_range: the lowest and the highest reward of a completion; `stop` needs it.
        stop_chance: stop also those that are kept with at most this probability; in [0, 1), 0 is exact.
        allocate: dynamic completion allocation: a step takes floor(G / k) times as many prompts (scope `batch`:
            floor(1 / (1 - rate)) times), so that an update keeps its size in completions.
        outcomes: groups. advantage: [S], of the full group.
    Returns: [S] bool.
    Edge cases: a group of one is kept. G counts valid completions, and those that `stop` has stopped. `random` depends
        on `outcomes.identity` alone (prompt uid and sample; the position without one), not on rewards or a random
        state.
    Source: CPPO (completion pruning), arXiv 2503.22342. Differs: the original ranks the local batch, one group or
        several (C2). As in the original, the normaliser counts kept completions only (C3).
    """

    rate: float = 0.5
    keep: Literal["largest", "smallest", "random"] = "largest"
    scope: Literal["group", "batch"] = "group"
    count: Literal["keep", "drop"] = "keep"
    allocate: bool = False
    at_least: float = 0.0
    stop: bool = False
    reward_range: tuple[float, float] | None = None
    stop_chance: float = 0.0
    needs: ClassVar[frozenset[str]] = frozenset({"advantage"})
    reason: ClassVar[str] = "pruned"
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "allocate": {"allocate": True},
        "batch": {"rate": 0.75, "scope": "batch", "allocate": True},
        "at_least": {"at_least": 0.5},
    }

    def __post_init__(self) -> None:
        require(0 <= self.rate < 1, "rate", self.rate, "must be in [0, 1)")
        require(0 <= self.at_least <= 1, "at_least", self.at_least, "must be in [0, 1]")
        require(0 <= self.stop_chance < 1, "stop_chance", self.stop_chance, "must be in [0, 1); 0 is exact")
        check_choices(self)
        require(self.at_least == 0 or self.keep == "largest", "at_least", self.at_least, "needs keep=largest")
        if self.stop:
            self._check_stop()

    def _check_stop(self) -> None:
        """Raise FieldError where no completion can be known to be dropped before it ends."""
        require(self.keep == "largest", "stop", True, "needs keep=largest")
        require(self.scope == "group", "stop", True, "needs scope=group")
        require(self.reward_range is not None, "stop", True, "needs reward_range, such as [0, 1]")
        low, high = self.reward_range or (0.0, 0.0)
        ordered = -math.inf < low < high < math.inf
        require(ordered, "reward_range", self.reward_range, "must be two finite numbers, the lower one first")

    @property
    def local(self) -> bool:
        return self.scope == "group"

    def kept(self, size: int) -> int:
        """k, the number of completions kept out of `size`."""
        if self.count == "drop":
            return max(1, size - math.floor(size * self.rate + 1e-9))
        return max(1, math.floor(size * (1 - self.rate) + 1e-9))

    def prompts_factor(self, size: int) -> int:
        if not self.allocate:
            return 1
        if self.scope == "group":
            return size // self.kept(size)
        return math.floor(1 / (1 - self.rate) + 1e-9)

    def keeps_size(self, size: int) -> bool:
        """True if `prompts_factor` times as many groups of `size` leave exactly as many completions as no pruning."""
        if self.scope == "group":
            return self.prompts_factor(size) * self.kept(size) == size
        return abs(self.prompts_factor(size) * (1 - self.rate) - 1) < 1e-9

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        index = group_index(outcomes, self.scope)
        size = advantage.abs().double()
        identity = outcomes.identity
        if identity is None:
            identity = torch.arange(len(index), device=index.device)
        key = {"largest": -size, "smallest": size, "random": value_hash(identity)}[self.keep]
        if outcomes.stopped is not None:
            key = key.where(~outcomes.stopped, torch.inf)
        sizes = torch.bincount(index).tolist()
        limit = torch.tensor([self.kept(n) for n in sizes], dtype=torch.long, device=index.device)
        keep = rank_in_group(key, index) < limit[index]
        if self.at_least:
            keep &= size >= self.at_least * group_max(size, index)
        if outcomes.stopped is not None:
            keep &= ~outcomes.stopped
        return keep


@dataclass(frozen=True)
class Balance(Selection):
    """Balance positive and negative advantages: drop completions of the more frequent sign, the smallest |A| first.

    Args:
        scope: balance each `group` or the whole `batch`.
        most: largest allowed ratio of the more frequent to the less frequent sign, >= 1.
        outcomes: groups. advantage: [S].
    Returns: [S] bool.
    Edge cases: if one sign is absent, all are kept; an advantage of exactly 0 is always kept. Ties by index.
    """

    scope: Literal["group", "batch"] = "batch"
    most: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset({"advantage"})
    reason: ClassVar[str] = "unbalanced"

    def __post_init__(self) -> None:
        check_choices(self)
        require(self.most >= 1, "most", self.most, "must be >= 1")

    @property
    def local(self) -> bool:
        return self.scope == "group"

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        index = group_index(outcomes, self.scope)
        keep = torch.ones_like(outcomes.valid)
        for sign in (1, -1):
            same = advantage * sign > 0
            other = advantage * sign < 0
            others = group_sum(other.long(), index)
            rank = rank_in_group(torch.where(same, -advantage.abs().double(), torch.inf), index)
            keep &= ~(same & (others > 0) & (rank >= torch.floor(others * self.most)))
        return keep


@dataclass(frozen=True)
class BestAndWorst(Selection):
    """Keep of each group the completion with the largest advantage and the one with the smallest: the pair that
    `algorithm.preference` compares.

    Args:
        min_gap: difference of their advantages, >= 0, that a pair must exceed; a group without such a pair is dropped.
            In reward units where the advantage is a difference of rewards, as with `{kind: grpo, scale: none}`.
        outcomes: groups. advantage: [S].
    Returns: [S] bool, two or no completions of each group.
    Edge cases: of equal advantages the first completion is taken; a group of equal ones (a tie) is dropped; a
        `drop_uniform_groups` before it counts such groups under its own name.
    Source: online DPO with the best and the worst of n, as in RLHFlow, arXiv 2405.07863.
    """

    min_gap: float = 0.0
    needs: ClassVar[frozenset[str]] = frozenset({"advantage"})
    reason: ClassVar[str] = "not_in_a_pair"
    local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 <= self.min_gap < math.inf, "min_gap", self.min_gap, "must be >= 0 and finite")

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        index = group_index(outcomes, "group")
        value = advantage.double()
        best = rank_in_group(-value, index) == 0
        worst = rank_in_group(value, index) == 0
        top = torch.zeros_like(value)  # of each group, by its number
        bottom = torch.zeros_like(value)
        top[index[best]] = value[best]
        bottom[index[worst]] = value[worst]
        differ = top - bottom > self.min_gap
        return (best | worst) & differ[index]


def group_index(outcomes: Outcomes, scope: Literal["group", "batch"]) -> Tensor:
    """[S] int64, the number of each completion's group; all 0 for the scope `batch`."""
    if scope == "group":
        return GroupStatistics.of(outcomes).index
    return torch.zeros_like(outcomes.group, dtype=torch.long)


def rank_in_group(key: Tensor, index: Tensor) -> Tensor:
    """[S] int64, the rank of each completion in its group by ascending `key` [S]; ties by position."""
    order = key.argsort(stable=True)
    order = order[index[order].argsort(stable=True)]
    total = torch.bincount(index, minlength=1)
    start = total.cumsum(0) - total
    rank = torch.empty_like(index)
    rank[order] = torch.arange(len(index), device=index.device) - start[index[order]]
    return rank
