"""Selection: the choice of completions for the update. Each spec sees only what the specs before it kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from proxima.core.advantage.group import GroupStatistics, group_sum
from proxima.core.spec import Spec
from proxima.data import Outcomes, require
from proxima.data.outcomes import METRIC_ALIASES


class Selection(Spec, Protocol):
    """A frozen dataclass; calling it gives [S] bool, True for the completions that are kept. Subclass it to get the
    defaults.

    needs: {"advantage"} if it reads the advantage; an advantage of tokens is unknown while a batch is being filled.
    reason: the name of its drops in logs.
    local: the decision on a group depends on that group alone. While dynamic sampling fills a batch, it asks the local
        specs that precede the first other one which groups are worth keeping.
    """

    reason: ClassVar[str]

    @property
    def local(self) -> bool:
        return False

    def prompts_factor(self, size: int) -> int:
        """The factor by which this spec raises the number of prompts of a step, with groups of `size`."""
        return 1

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor: ...


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


def select(
    specs: Sequence[Selection], outcomes: Outcomes, advantage: Tensor, *, unscored: bool = False
) -> tuple[Tensor, list[str | None]]:
    """Apply the specs in order.

    Args:
        specs: each sees only the completions that the earlier ones kept.
        outcomes: S completions; invalid ones are dropped first, for the reason "invalid".
        advantage: [S].
        unscored: keep invalid ones too, until a spec drops them.
    Returns: keep [S] bool, and the reason why each completion was dropped, None if it was kept.
    """
    keep = torch.ones_like(outcomes.valid) if unscored else outcomes.valid.clone()
    reasons: list[str | None] = [None if valid else "invalid" for valid in keep.tolist()]
    for spec in specs:
        left = keep.nonzero().flatten()
        kept = spec(outcomes.take(left), advantage[left])
        for i in left[~kept].tolist():
            reasons[i] = spec.reason
        keep[left] = kept
    return keep, reasons


def prompts_factor(specs: Sequence[Selection], size: int) -> int:
    """The factor by which all specs together raise the number of prompts of a step, with groups of `size`."""
    return math.prod(spec.prompts_factor(size) for spec in specs)
