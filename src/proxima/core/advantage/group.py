"""Advantages of whole completions, from the rewards of their group: [S] rewards in, [S] advantages out. First what they
share, then GRPO, then the others."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.advantage.protocol import GroupAdvantage, required
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
    if len(reward) > 1:
        return reward.std()
    return reward.new_zeros(())


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
    centre: ClassVar[str] = "mean"

    def __call__(self, outcomes: Outcomes) -> Tensor:
        group = GroupStatistics.of(outcomes)
        centred = group.reward - group.mean
        if self.scale != "none":
            std = group.std if self.scale == "group" else batch_std(outcomes)
            centred = centred / (std + self.epsilon)
        return zero_if_uniform(outcomes, group, centred)


@dataclass(frozen=True)
class Opo(GroupAdvantage):
    """Reward minus the length-weighted mean of its group: the baseline of minimum variance if all token gradients have
    the same norm.

        A = r - sum(len r) / sum(len)        len: loss tokens

    Args:
        outcomes: rewards, validity, groups, `loss_tokens` (`length` if omitted).
    Returns: [S] in the rewards' dtype. Edge cases: as `Grpo`; a group without a loss token gives 0.
    Source: arXiv 2505.23585, where len is the response length, because the gradient's squared norm is assumed to grow
        with it: so only tokens with a gradient count, as in verl `opo` (sums of `response_mask`).
    Differs: verl gives a group of one its raw reward (P16).
    """

    def __call__(self, outcomes: Outcomes) -> Tensor:
        group = GroupStatistics.of(outcomes)
        length = token_weight(outcomes).to(group.reward.dtype)
        total = group_sum(length, group.index)
        baseline = group_sum(length * group.reward, group.index) / total.clamp(min=1)
        centred = torch.where(total > 0, group.reward - baseline, 0.0)
        return zero_if_uniform(outcomes, group, centred)


@dataclass(frozen=True)
class GrpoPassk(Scaled):
    """Pass@k: only the best completion of a group has an advantage, its margin over the second best.

        A_best = (r_best - r_second) / (std + epsilon), 0 for the others

    Args:
        scale: `group` divides by the group's standard deviation (ddof = 1), `none` does not.
        epsilon: added to the standard deviation, > 0.
    Returns: [S] in the rewards' dtype. Edge cases: all 0 in a tie for the best, and in a group of one (verl raises).
    Source: arXiv 2503.19595. verl `grpo_passk`. Differs: in a group of one; in a tie verl's (r - r) / std is 0 too.
    """

    scale: Literal["none", "group"] = "group"
    epsilon: float = 1e-6

    def __call__(self, outcomes: Outcomes) -> Tensor:
        group = GroupStatistics.of(outcomes)
        reward = torch.where(outcomes.valid, group.reward, -torch.inf)
        is_best = outcomes.valid & (reward == group_max(reward, group.index))
        unique = group_sum(is_best.to(reward.dtype), group.index) == 1
        second = group_max(torch.where(is_best, -torch.inf, reward), group.index)
        margin = torch.where(is_best & unique & (group.count > 1), group.reward - second, 0.0)
        if self.scale == "group":
            return margin / (group.std + self.epsilon)
        return margin


@dataclass(frozen=True)
class Gpg(GroupAdvantage):
    """Centred rewards, scaled up where few completions of the batch have a reward.

        A = alpha (r - mean_group) / f_norm        alpha = completions / completions with a non-zero reward

    Args:
        f_norm: > 0.
    Returns: [S] in the rewards' dtype. Edge cases: as `Grpo`; a batch of zeros gives 0; invalid rewards do not count.
    Source: GPG, arXiv 2504.02546. verl `gpg`. Differs: verl gives a group of one its raw reward (P16); the standard
        deviation that verl computes there is unused (P19).
    """

    f_norm: float = 1.0
    centre: ClassVar[str] = "mean"

    def __post_init__(self) -> None:
        require(self.f_norm > 0, "f_norm", self.f_norm, "must be > 0")

    def __call__(self, outcomes: Outcomes) -> Tensor:
        group = GroupStatistics.of(outcomes)
        alpha = outcomes.valid.sum() / (group.reward != 0).sum().clamp(min=1)
        return zero_if_uniform(outcomes, group, alpha * (group.reward - group.mean) / self.f_norm)


@dataclass(frozen=True)
class Remax(GroupAdvantage):
    """Reward minus the reward of the greedy completion of the same prompt: A = r − r_greedy.

    Args:
        outcomes: rewards, validity, and `baseline` [S], the greedy completion's reward; NaN there gives 0.
    Returns: [S] in the rewards' dtype. Edge cases: invalid: 0. A group of one is fine.
    Source: arXiv 2310.10505. verl `remax`. Differs: only with per-token rewards, where verl's is a
        reward-to-go, see `ReinforcePp`.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"baseline"})
    centre: ClassVar[str] = "baseline"
    exempt_laws: ClassVar[frozenset[str]] = frozenset({"uniform_group"})  # the baseline is another completion's reward

    def __call__(self, outcomes: Outcomes) -> Tensor:
        baseline = required(self, "baseline", outcomes.baseline)
        scored = outcomes.valid & baseline.isfinite()
        return torch.where(scored, outcomes.reward - baseline, 0.0)


@dataclass(frozen=True)
class ReinforcePpBaseline(GroupAdvantage):
    """REINFORCE++ with a group baseline: rewards centred in their group, then whitened over all loss tokens.

        A = whiten(r - mean_group)        whiten(x) = (x - mean) / sqrt(var + 1e-8) over loss tokens, ddof = 1

    Args:
        outcomes: rewards, validity, groups, `loss_tokens` (`length` if omitted), as verl's `masked_whiten` counts them.
    Returns: [S]. Edge cases: invalid: 0. A uniform group is 0 before whitening, and one small number after it.
    Source: arXiv 2501.03262. verl `reinforce_plus_plus_baseline`. Differs: verl gives a group of one its raw reward
        (P16).
    """

    exempt_laws: ClassVar[frozenset[str]] = frozenset({"uniform_group"})  # whitening moves a group of zeros

    def __call__(self, outcomes: Outcomes) -> Tensor:
        group = GroupStatistics.of(outcomes)
        return whitened_over_tokens(zero_if_uniform(outcomes, group, group.reward - group.mean), outcomes)


@dataclass(frozen=True)
class Gdpo(Scaled):
    """Each reward is normalised in its group before they are summed, so that a reward of small scale still counts.

        A = finish(sum_k weight_k (r_k - mean_group r_k) / (std_group r_k + epsilon))

    Args:
        weights: one per column of `parts`, the rewards in the recipe's order; null: all 1.
        scale: `group` divides each reward by its standard deviation (ddof = 1), `none` only centres it.
        epsilon: added to the standard deviation, > 0.
        finish: `tokens` whitens over loss tokens (verl), `completions` standardises over completions with `epsilon`
            (TRL), `none`.
        outcomes: `parts` [S, R]; without it `reward` is the only one. `loss_tokens` (`length` if omitted) for
            `finish: tokens`.
    Returns: [S]. Raises: FieldError if `weights` does not fit `parts`.
    Edge cases: a reward that is uniform in a group adds 0. So does NaN, where a reward failed or does not apply to the
        row (its function returned None); mean and deviation of the group are then over the other completions. In a
        batch of several tasks, each group is judged by its own rewards alone. Invalid: 0.
    Source: arXiv 2601.05242. verl `gdpo` (P20), TRL `multi_objective_aggregation: normalize_then_sum` (T10).
    Differs: verl computes in float32 and gives groups of one the raw reward (P16, P20).
    """

    weights: tuple[float, ...] | None = None
    scale: Literal["none", "group"] = "group"
    epsilon: float = 1e-6
    finish: Literal["tokens", "completions", "none"] = "tokens"
    exempt_laws: ClassVar[frozenset[str]] = frozenset({"uniform_group"})  # whitening moves a group of zeros

    def __call__(self, outcomes: Outcomes) -> Tensor:
        parts = outcomes.parts
        if parts is None:
            parts = outcomes.reward[:, None]
        weights = self.weights
        if weights is None:
            weights = (1.0,) * parts.shape[1]
        bound = f"must have one number for each of the {parts.shape[1]} rewards"
        require(len(weights) == parts.shape[1], "weights", weights, bound)
        inner = Grpo(scale=self.scale, epsilon=self.epsilon)
        total = torch.zeros_like(outcomes.reward)
        for weight, part in zip(weights, parts.unbind(1), strict=True):
            single = replace(outcomes, reward=part, valid=outcomes.valid & part.isfinite(), parts=None)
            total = total + weight * inner(single)
        if self.finish == "tokens":
            return whitened_over_tokens(total, outcomes)
        if self.finish == "completions":
            return standardised(total, outcomes.valid, self.epsilon)
        return total


def token_weight(outcomes: Outcomes) -> Tensor:
    """[S] int, the loss tokens of each valid completion, 0 where invalid. Tokens without a gradient (tool output) are
    not counted."""
    tokens = outcomes.loss_tokens
    if tokens is None:
        tokens = outcomes.length
    return torch.where(outcomes.valid, tokens, 0)


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
    centre: ClassVar[str] = "mean"

    def __call__(self, outcomes: Outcomes) -> Tensor:
        group = GroupStatistics.of(outcomes)
        leave_one_out = (group.reward - group.mean) * group.count / (group.count - 1).clamp(min=1)
        centred = zero_if_uniform(outcomes, group, leave_one_out)
        if self.normalise:
            return standardised(centred, outcomes.valid & (group.count > 1), 1e-4)
        return centred


def standardised(advantage: Tensor, valid: Tensor, epsilon: float) -> Tensor:
    """(A − mean) / (std + ε) over the valid completions, ddof = 1; 0 where invalid, and for fewer than two."""
    chosen = advantage[valid]
    if len(chosen) < 2:
        return torch.zeros_like(advantage)
    return torch.where(valid, (advantage - chosen.mean()) / (chosen.std() + epsilon), 0.0)
