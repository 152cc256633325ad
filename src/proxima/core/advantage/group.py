"""Advantages of whole completions: [S] rewards in, [S] advantages out."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from proxima.core.advantage.protocol import GroupAdvantage
from proxima.data import Outcomes, check_choices, require


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


def token_weight(outcomes: Outcomes) -> Tensor:
    """[S] int, the loss tokens of each valid completion, 0 where invalid. Tokens without a gradient (tool output) are
    not counted."""
    return torch.where(outcomes.valid, outcomes.length if outcomes.loss_tokens is None else outcomes.loss_tokens, 0)


def whitened_over_tokens(advantage: Tensor, outcomes: Outcomes, epsilon: float = 1e-8) -> Tensor:
    """[S] (A − mean) / sqrt(var + ε), mean and variance (ddof = 1) over the tokens of all valid completions.

    Args: advantage [S]; outcomes: `valid`, and the loss tokens, the weight of each completion.
    Returns: [S], 0 where invalid; unchanged if there are fewer than two tokens.
    """
    weight = token_weight(outcomes).to(advantage.dtype)
    tokens = weight.sum()
    if float(tokens) < 2:
        return advantage
    mean = (weight * advantage).sum() / tokens
    variance = (weight * (advantage - mean).square()).sum() / (tokens - 1)
    whitened = (advantage - mean) * torch.rsqrt(variance + epsilon)
    return torch.where(outcomes.valid, whitened, 0.0)


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


@dataclass(frozen=True)
class Rloo(GroupAdvantage):
    """Reward minus the mean of the others in its group.

        A_i = r_i - mean_{j != i} r_j = (r_i - mean_group) n / (n - 1)

    Args:
        normalise: standardise over the batch: (A - mean) / (std + 1e-4), ddof = 1, of the completions that have a
            valid sibling.
        outcomes: rewards, validity, groups.
    Returns: [S] in the rewards' dtype, reward units.
    Edge cases: a uniform group gives exactly 0 (before normalisation). A completion without a valid sibling has nothing
        to be compared with: 0, also after normalisation, where it enters neither mean nor deviation. Invalid rewards
        give 0 and enter no baseline.
    Source: arXiv 2402.14740; `normalise`: TRL `normalize_advantages` (T10).
    Differs: TRL counts a completion without a sibling as 0 when it normalises. verl's `rloo` keeps the raw reward of a
        group of one, its `rloo_vectorized` gives 0 (P16).
    """

    normalise: bool = False

    def __call__(self, outcomes: Outcomes) -> Tensor:
        group = GroupStatistics.of(outcomes)
        leave_one_out = (group.reward - group.mean) * group.count / (group.count - 1).clamp(min=1)
        centred = zero_if_uniform(outcomes, group, leave_one_out)
        return standardised(centred, outcomes.valid & (group.count > 1), 1e-4) if self.normalise else centred


def standardised(advantage: Tensor, valid: Tensor, epsilon: float) -> Tensor:
    """(A − mean) / (std + ε) over the valid completions, ddof = 1; 0 where invalid, and for fewer than two."""
    chosen = advantage[valid]
    if len(chosen) < 2:
        return torch.zeros_like(advantage)
    return torch.where(valid, (advantage - chosen.mean()) / (chosen.std() + epsilon), 0.0)
