"""Losses of scalar heads: the critic of PPO and the reward model."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from proxima.core.metrics import Metrics, Peak, SumCount
from proxima.data import check_choices, require


@dataclass(frozen=True)
class ValueLoss:
    """PPO's clipped value loss: in one update the critic may move from its earlier estimate by at most the clip.

        loss_t = max(e(V - R), e(V_clip - R))        V_clip = V_before + clip(V - V_before, -epsilon, epsilon)
        squared: e(x) = x^2 / 2        huber: e(x) = x^2 / 2 if |x| < delta else delta (|x| - delta / 2)

    Args:
        epsilon: clip range, value units, > 0; inf: no clipping.
        error: `squared` or `huber`. delta: of `huber`, > 0.
    Source: PPO implementations since OpenAI baselines. verl `compute_value_loss`, TRL PPO (vf_coef there multiplies the
        half), AReaL `ppo_critic_loss_fn`. Differs: verl takes the half after aggregation, the same number. A NaN
        outside the mask stays out.
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
            value_before, returns: [N], the estimates at rollout time, and the targets.
        Returns: [N] with gradient, 0 outside the mask, to be aggregated like a policy loss; metrics
            `value_clip_fraction`, `value_mean`.
        """
        value, before, target = (torch.where(mask, x, 0.0) for x in (value, value_before.detach(), returns.detach()))
        clipped = torch.clamp(value, before - self.epsilon, before + self.epsilon)
        unclipped, bounded = self._error(value - target), self._error(clipped - target)
        metrics: Metrics = {
            "value_clip_fraction": SumCount.over(bounded > unclipped, mask),
            "value_mean": SumCount.over(value, mask),
        }
        return torch.where(mask, torch.maximum(unclipped, bounded), 0.0), metrics

    def _error(self, gap: Tensor) -> Tensor:
        if self.error == "squared":
            return 0.5 * gap.square()
        return torch.where(gap.abs() < self.delta, 0.5 * gap.square(), self.delta * (gap.abs() - 0.5 * self.delta))


@dataclass(frozen=True)
class RewardLoss:
    """Pairwise loss of a reward model: the chosen answer should score higher than the rejected one, by the margin.

        loss = -log sigmoid(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)^2

    Args:
        center: coefficient that pulls scores towards 0, >= 0.
    Source: Bradley-Terry; margin: Llama 2, arXiv 2307.09288; centring: arXiv
        2312.09244. TRL RewardTrainer.
    """

    center: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.center < float("inf"), "center", self.center, "must be >= 0 and finite")

    def __call__(self, chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> tuple[Tensor, Metrics]:
        """The loss of each pair.

        Args:
            chosen, rejected: [S] float, with gradient, reward units. margin: [S] or one number.
        Returns: [S] with gradient, to be averaged; metrics `accuracy` (strictly higher; a tie is wrong), `margin`,
            `reward_mean` and extremes.
        """
        loss = -torch.nn.functional.logsigmoid(chosen - rejected - margin) + self.center * (chosen + rejected).square()
        both = torch.cat([chosen, rejected])
        every, all_ = (torch.ones_like(x, dtype=torch.bool) for x in (chosen, both))
        metrics: Metrics = {
            "accuracy": SumCount.over(chosen > rejected, every),
            "margin": SumCount.over(chosen - rejected, every),
            "reward_mean": SumCount.over(both, all_),
            "reward_max": Peak.over(both, all_),
            "reward_min": Peak.over(both, all_, largest=False),
        }
        return loss, metrics
