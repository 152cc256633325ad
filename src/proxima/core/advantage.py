"""Advantages: rewards of completions → how much better each did than expected. [S] in, [S] out.

Invalid rewards enter no mean, no standard deviation and no batch; their advantage is 0. A uniform group is one whose largest and smallest
valid rewards are equal; it is never found by its standard deviation, which rounding can make anything.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from proxima.data import Outcomes, require


class Advantage(Protocol):
    """A frozen dataclass; calling it gives [S] advantages, 0 where `valid` is False."""

    def __call__(self, outcomes: Outcomes) -> Tensor: ...


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each completion's group over its valid rewards, spread back to the completions: [S] each.

    `reward` is 0 where invalid; `count` the valid ones of the group; `mean`; `std` (ddof = 1, 0 for fewer than two); `uniform` True where
    the group has fewer than two valid rewards, or all its valid rewards are equal.
    """

    reward: Tensor
    count: Tensor
    mean: Tensor
    std: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, outcomes: Outcomes) -> "GroupStatistics":
        valid = outcomes.valid
        zero = torch.zeros((), dtype=outcomes.reward.dtype, device=outcomes.reward.device)
        reward = torch.where(valid, outcomes.reward, zero)
        label, index = torch.unique(outcomes.group, return_inverse=True)
        empty = reward.new_zeros(len(label))
        count = empty.index_add(0, index, valid.to(reward.dtype))[index]
        mean = empty.index_add(0, index, reward)[index] / count.clamp(min=1)
        square = torch.where(valid, (reward - mean).square(), zero)
        std = (empty.index_add(0, index, square)[index] / (count - 1).clamp(min=1)).sqrt()
        high = empty.scatter_reduce(0, index, torch.where(valid, reward, -torch.inf), "amax", include_self=False)[index]
        low = empty.scatter_reduce(0, index, torch.where(valid, reward, torch.inf), "amin", include_self=False)[index]
        return cls(reward, count, mean, std, (count < 2) | (high == low))


def batch_std(outcomes: Outcomes) -> Tensor:
    """[] standard deviation (ddof = 1) of all valid rewards; 0 for fewer than two."""
    reward = outcomes.reward[outcomes.valid]
    return reward.std() if len(reward) > 1 else reward.new_zeros(())


@dataclass(frozen=True)
class Grpo:
    """Reward minus the mean of its group, divided by a standard deviation or not.

        A = (r - mean_group) / (std + epsilon)

    Args:
        scale: `none` does not divide (Dr. GRPO); `group` by the group's standard deviation, `batch` by that of the whole batch; ddof = 1.
        epsilon: added to the standard deviation, > 0. verl 1e-6, TRL and completion pruning 1e-4.
        outcomes: rewards, validity, groups.
    Returns: [S] in the rewards' dtype, reward units (or standard deviations).
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: a uniform group gives exactly 0, whatever rounding does to its mean; so does a group with one valid reward. Invalid: 0.
    Source: GRPO, arXiv 2402.03300, Sec. 4.1; Dr. GRPO 2503.20783 for `none`.
    Differs: verl gives a group of one its raw reward (P16). TRL and verl find uniform groups by the standard deviation or not at all.
    """

    scale: Literal["none", "group", "batch"] = "none"
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require(self.scale in ("none", "group", "batch"), "scale", self.scale, "must be none, group or batch")
        require(self.epsilon > 0, "epsilon", self.epsilon, "must be > 0")

    def __call__(self, outcomes: Outcomes) -> Tensor:
        group = GroupStatistics.of(outcomes)
        centred = group.reward - group.mean
        if self.scale != "none":
            std = group.std if self.scale == "group" else batch_std(outcomes)
            centred = centred / (std + self.epsilon)
        return torch.where(outcomes.valid & ~group.uniform, centred, torch.zeros_like(centred))


@dataclass(frozen=True)
class Rloo:
    """Reward minus the mean of the others in its group.

        A_i = r_i - mean_{j != i} r_j = (r_i - mean_group) n / (n - 1)

    Args:
        outcomes: rewards, validity, groups.
    Returns: [S] in the rewards' dtype, reward units.
    Edge cases: a uniform group gives exactly 0, so does a group with one valid reward. Invalid: 0, and no one's baseline.
    Source: arXiv 2402.14740, Eq. 9. Differs: verl's `rloo` keeps the raw reward of a group of one, its `rloo_vectorized` gives 0 (P16).
    """

    def __call__(self, outcomes: Outcomes) -> Tensor:
        group = GroupStatistics.of(outcomes)
        centred = (group.reward - group.mean) * group.count / (group.count - 1).clamp(min=1)
        return torch.where(outcomes.valid & ~group.uniform, centred, torch.zeros_like(centred))


ADVANTAGES: dict[str, type] = {"grpo": Grpo, "rloo": Rloo}
