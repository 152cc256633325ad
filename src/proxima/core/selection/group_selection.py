"""Selections that drop: groups whose completions are alike, and completions that were cut off."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from proxima.core.advantage.group import GroupStatistics, group_sum
from proxima.core.selection.protocol import Selection
from proxima.data import require
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
