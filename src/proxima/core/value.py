"""Losses of scalar heads, those of PPO's critic and of a reward model, and how well a critic predicts."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from proxima.core.advantage.group import group_sum
from proxima.core.advantage.protocol import TokenRewards
from proxima.core.advantage.token import reward_to_go
from proxima.core.metrics import Metrics, Peak, SumCount
from proxima.core.segment import segment_index, segment_sum
from proxima.data import require
from proxima.data.field_checks import check_choices


@dataclass(frozen=True)
class ValueLoss:
    """PPO's clipped value loss: no gradient once a value has moved towards its target by more than the clip range.

        loss_t = max(e(V - R), e(V_clip - R))        V_clip = V_before + clip(V - V_before, -epsilon, epsilon)
        squared: e(x) = x^2 / 2        huber: e(x) = x^2 / 2 if |x| < delta else delta (|x| - delta / 2)

    Args:
        epsilon: clip range, value units, > 0; inf: no clipping.
        error: `squared` or `huber`.
        delta: of `huber`, value units, > 0.
    Edge cases: NaN outside the mask has no effect.
    Source: PPO implementations since OpenAI baselines. verl `compute_value_loss`, TRL PPO (vf_coef there multiplies the
        half), AReaL `ppo_critic_loss_fn`.
    Differs: verl takes the half after aggregation, which gives the same number.
    """

    epsilon: float = 0.2
    error: Literal["squared", "huber"] = "squared"
    delta: float = 10.0

    def __post_init__(self) -> None:
        require(self.epsilon > 0, "epsilon", self.epsilon, "must be > 0; inf turns clipping off")
        check_choices(self)
        require(self.delta > 0, "delta", self.delta, "must be > 0")

    def __call__(self, value: Tensor, value_before: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
        """The loss of each token.

        Args:
            value: [N] float, with gradient, value units. mask: [N] bool.
            value_before, returns: [N] float, the critic's estimates before the step's updates, and the targets;
                detached.
        Returns: [N] with gradient, 0 outside the mask, to be aggregated like a policy loss; metrics
            `value_clip_fraction` (share of tokens whose clipped error is the larger one) and `value_mean`.
        """
        value = torch.where(mask, value, 0.0)
        before = torch.where(mask, value_before.detach(), 0.0)
        target = torch.where(mask, returns.detach(), 0.0)
        clipped = torch.clamp(value, before - self.epsilon, before + self.epsilon)
        unclipped = self._error(value - target)
        bounded = self._error(clipped - target)
        metrics: Metrics = {
            "value_clip_fraction": SumCount.over(bounded > unclipped, mask),
            "value_mean": SumCount.over(value, mask),
        }
        return torch.where(mask, torch.maximum(unclipped, bounded), 0.0), metrics

    def _error(self, gap: Tensor) -> Tensor:
        if self.error == "squared":
            return 0.5 * gap.square()
        return torch.where(gap.abs() < self.delta, 0.5 * gap.square(), self.delta * (gap.abs() - 0.5 * self.delta))


def explained_variance(prediction: Tensor, target: Tensor, mask: Tensor) -> float:
    """1 − Var(target − prediction) / Var(target) over the tokens of the mask: 1 is perfect, 0 is no better than a
    constant, below 0 is worse than one. NaN if the target does not vary, or for fewer than two tokens. [N] float each;
    mask [N] bool.
    """
    chosen = target[mask].double()
    error = (target - prediction)[mask].double()
    if len(chosen) < 2 or float(chosen.max()) == float(chosen.min()):
        return float("nan")
    return float(1 - error.var() / chosen.var())


def value_metrics(rewards: TokenRewards, returns: Tensor, gamma: float = 1.0) -> dict[str, float]:
    """Measure how well the values predict the rewards that came, against a baseline without a critic.

        target G_t = Σ_{k ≥ t} γ^(k-t) r_k, without any bootstrapped value: λ-returns contain the critic's own estimates

    Args:
        rewards: with `value` and `group`. returns: [N] float, reward units, the critic's targets. gamma: γ.
    Returns: by name, without NaN: `value/explained_variance` of V_t; `value/explained_variance_prompt_mean` of the mean
        reward of the prompt's *other* completions (the baseline of `rloo`); `returns/mean` over the loss tokens.
    """
    assert rewards.value is not None and rewards.group is not None
    mask = rewards.loss_mask
    target = reward_to_go(rewards, gamma)
    index = torch.unique(rewards.group, return_inverse=True)[1]
    total = segment_sum(torch.where(mask, rewards.reward, 0.0), rewards.cu_seqlens)
    others = group_sum(torch.ones_like(total), index) - 1
    mean = (group_sum(total, index) - total) / others.clamp(min=1)
    token = segment_index(rewards.cu_seqlens, len(mask))
    metrics = {
        "value/explained_variance": explained_variance(rewards.value, target, mask),
        "value/explained_variance_prompt_mean": explained_variance(mean[token], target, mask & (others > 0)[token]),
        "returns/mean": SumCount.over(returns, mask).value,
    }
    return {name: value for name, value in metrics.items() if value == value}


@dataclass(frozen=True)
class RewardLoss:
    """Pairwise loss of a reward model: the chosen answer should score higher than the rejected one by the margin.

        loss = -log sigmoid(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)^2

    Args:
        center: coefficient of the term that pulls scores towards 0, >= 0.
    Source: Bradley-Terry; margin: Llama 2, arXiv 2307.09288; centring: arXiv 2312.09244. TRL RewardTrainer.
    """

    center: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.center < float("inf"), "center", self.center, "must be >= 0 and finite")

    def __call__(self, chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> tuple[Tensor, Metrics]:
        """The loss of each pair.

        Args:
            chosen, rejected: [S] float, with gradient, reward units. margin: [S] float, detached, or one number.
        Returns: [S] with gradient, to be averaged; metrics `accuracy` (a tie counts as wrong), `margin` (the mean of
            chosen - rejected), `reward_mean`, `reward_max` and `reward_min`.
        """
        if isinstance(margin, Tensor):
            margin = margin.detach()
        loss = -torch.nn.functional.logsigmoid(chosen - rejected - margin) + self.center * (chosen + rejected).square()
        both = torch.cat([chosen, rejected])
        every = torch.ones_like(chosen, dtype=torch.bool)
        all_ = torch.ones_like(both, dtype=torch.bool)
        metrics: Metrics = {
            "accuracy": SumCount.over(chosen > rejected, every),
            "margin": SumCount.over(chosen - rejected, every),
            "reward_mean": SumCount.over(both, all_),
            "reward_max": Peak.over(both, all_),
            "reward_min": Peak.over(both, all_, largest=False),
        }
        return loss, metrics
