"""GRPO, and what the advantages of whole completions share: [S] rewards in, [S] advantages out."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from proxima.core.advantage.protocol import GroupAdvantage
from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.outcomes import Outcomes


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each completion's group over its valid rewards, [S] each.

    `reward` is 0 where invalid; `count` of valid rewards; `mean`; `std` (ddof = 1, 0 for fewer than two); `uniform`:
    fewer than two valid rewards, or all of them equal; `index` numbers the groups from 0.
    """

    reward: Tensor
    count: Tensor
    mean: Tensor
    std: Tensor
    uniform: Tensor
    index: Tensor

    @classmethod
    def of(cls, outcomes: Outcomes) -> "GroupStatistics":
        valid = outcomes.valid
        reward = torch.where(valid, outcomes.reward, 0.0)
        index = torch.unique(outcomes.group, return_inverse=True)[1]
        count = group_sum(valid.to(reward.dtype), index)
        mean = group_sum(reward, index) / count.clamp(min=1)
        square = torch.where(valid, (reward - mean).square(), 0.0)
        std = (group_sum(square, index) / (count - 1).clamp(min=1)).sqrt()
        high = group_max(torch.where(valid, reward, -torch.inf), index)
        low = -group_max(torch.where(valid, -reward, -torch.inf), index)
        return cls(reward, count, mean, std, (count < 2) | (high == low), index)


def group_sum(values: Tensor, index: Tensor) -> Tensor:
    """[S] the sum of `values` [S] over the completion's group; `index` [S] int64 numbers the groups below S."""
    return torch.zeros_like(values).index_add(0, index, values)[index]


def group_max(values: Tensor, index: Tensor) -> Tensor:
    """[S] the largest of `values` [S] in the completion's group; `index` as for `group_sum`."""
    return torch.zeros_like(values).scatter_reduce(0, index, values, "amax", include_self=False)[index]


def batch_std(outcomes: Outcomes) -> Tensor:
    """[] standard deviation (ddof = 1) of all valid rewards; 0 for fewer than two."""
    reward = outcomes.reward[outcomes.valid]
    return reward.std() if len(reward) > 1 else reward.new_zeros(())


def zero_if_uniform(outcomes: Outcomes, group: GroupStatistics, advantage: Tensor) -> Tensor:
    """`advantage`, with exactly 0 for invalid completions and uniform groups."""
    return torch.where(outcomes.valid & ~group.uniform, advantage, 0.0)


class Scaled(GroupAdvantage):
    """Base of advantages with an `epsilon` that is added to the standard deviation."""

    epsilon: float

    def __post_init__(self) -> None:
        check_choices(self)
        require(self.epsilon > 0, "epsilon", self.epsilon, "must be > 0")


@dataclass(frozen=True)
class Grpo(Scaled):
    """Reward minus the mean of its group, optionally divided by a standard deviation.

        A = (r - mean_group) / (std + epsilon)

    Args:
        scale: the standard deviation (ddof = 1) of the `group` or of the whole `batch`; `none`: no division (Dr. GRPO).
        epsilon: added to the standard deviation, > 0. verl 1e-6, TRL and completion pruning 1e-4.
        outcomes: rewards, validity, groups.
    Returns: [S] in the rewards' dtype, reward units (or standard deviations).
    Edge cases: a uniform group gives exactly 0, whatever the rounding of its mean; so does a group with one valid
        reward. Invalid: 0.
    Source: GRPO, arXiv 2402.03300, Sec. 4.1; Dr. GRPO 2503.20783 for `none`.
    Differs: verl gives a group of one its raw reward (P16). TRL and verl detect uniform groups by the standard
        deviation or not at all.
    """

    scale: Literal["none", "group", "batch"] = "none"
    epsilon: float = 1e-6

    def __call__(self, outcomes: Outcomes) -> Tensor:
        group = GroupStatistics.of(outcomes)
        centred = group.reward - group.mean
        if self.scale != "none":
            centred = centred / ((group.std if self.scale == "group" else batch_std(outcomes)) + self.epsilon)
        return zero_if_uniform(outcomes, group, centred)
