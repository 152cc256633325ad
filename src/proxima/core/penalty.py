"""Penalties added to the loss per token: the KL divergence from the reference policy, and an entropy bonus.

With d = log π − log π_ref on tokens sampled (nearly) from π, each kind estimates KL(π‖π_ref); they differ in bias,
variance and gradient. Detached, the same kinds give the KL term of a reward: `core.reward_kl.RewardKl`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from proxima.core.loss import Penalty
from proxima.core.metrics import k2, k3
from proxima.core.ratio import LOG_RATIO_LIMIT, masked_ratio
from proxima.core.tables import PENALTIES as PENALTIES
from proxima.data import PolicyBatch, require


@dataclass(frozen=True)
class _ReferenceKl(Penalty):
    coefficient: float = 0.001
    straight_through: bool = False
    unbiased: bool = False
    needs: ClassVar[frozenset[str]] = frozenset({"reference_log_prob"})

    def __post_init__(self) -> None:
        require(0 <= self.coefficient < float("inf"), "coefficient", self.coefficient, "must be >= 0 and finite")
        both = self.straight_through and self.unbiased
        require(not both, "unbiased", self.unbiased, "must be false with straight_through: both correct the gradient")
        if self.unbiased:
            object.__setattr__(self, "needs", frozenset({"proximal_log_prob", "reference_log_prob"}))

    def __call__(self, b: PolicyBatch) -> Tensor:
        """[N] coefficient · KL estimate, with gradient, 0 outside the loss."""
        value = self.divergence(b.masked("log_prob"), b.masked("reference_log_prob"))
        if self.unbiased:
            value = value * masked_ratio(b)
        return self.coefficient * value

    def divergence(self, log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
        """[N] the estimate itself, nats, without the coefficient; finite log-probs everywhere."""
        d = log_prob - reference_log_prob.detach()
        value = self.estimate(d)
        if self.straight_through:
            smooth = k2(d)
            value = value.detach() + smooth - smooth.detach()
        return value

    def estimate(self, d: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class K1(_ReferenceKl):
    """coefficient · d, d = log π − log π_ref: unbiased as a value; its expected gradient is 0: use it in the reward.

    Args:
        coefficient: >= 0, reward units per nat.
        straight_through: keep the value, take the gradient of `k2`, in expectation that of the reverse KL. verl's "+"
            kinds.
        unbiased: multiply by the ratio π / π_prox, with its gradient: unbiased for samples from the proximal policy.
        b: `log_prob` [N] with gradient, `reference_log_prob` [N] (`unbiased`: `proximal_log_prob` too), nats;
            `loss_mask` [N] bool.
    Returns: [N] with gradient, 0 outside the loss.
    Source: Schulman, "Approximating KL divergence", 2020; verl `k1`/`kl`; `unbiased`: DeepSeek-V3.2, arXiv 2512.02556,
        TRL `use_bias_correction_kl` (T5). Differs: it does not.
    """

    def estimate(self, d: Tensor) -> Tensor:
        return d


@dataclass(frozen=True)
class Abs(_ReferenceKl):
    """coefficient · |d|: a distance, not a KL; gradient sign(d), 0 at d = 0. Args, Returns: as `K1`. verl `abs`
    (P22)."""

    def estimate(self, d: Tensor) -> Tensor:
        return d.abs()


@dataclass(frozen=True)
class K2(_ReferenceKl):
    """coefficient · ½ d²: a biased value, the gradient of the reverse KL. Args, Returns: as `K1`. verl `k2`/`mse`."""

    def estimate(self, d: Tensor) -> Tensor:
        return k2(d)


@dataclass(frozen=True)
class K3(_ReferenceKl):
    """coefficient · (exp(−d) − 1 + d): unbiased and ≥ 0 as a value.

    Args: as `K1`, and
        limit: the value is clamped to ±limit nats, with gradient 0 beyond; inf: no clamp. verl has 10, AReaL an option.
    Returns: as `K1`. Edge cases: d is clamped to ±20, which keeps the exponential finite; beyond, the gradient is 0.
    Source: Schulman 2020; GRPO, arXiv 2402.03300, Eq. 4. verl `k3`/`low_var_kl`, TRL (T5).
    Differs: verl's clamp at 10 stops the gradient where the policy is farthest from the reference (P22).
    """

    limit: float = float("inf")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.limit > 0, "limit", self.limit, "must be > 0")

    def estimate(self, d: Tensor) -> Tensor:
        return k3(-d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class EntropyBonus(Penalty):
    """−coefficient · H_t: rewards a policy of high entropy.

    Args:
        coefficient: >= 0, reward units per nat.
        b: `entropy` [N], nats, with gradient; `loss_mask` [N] bool.
    Returns: [N] with gradient, 0 outside the loss.
    Raises: ValueError if the entropy has no gradient: the bonus would have no effect.
    Source: Williams and Peng, 1991; A3C, arXiv 1602.01783. verl `entropy_coeff`.
    """

    coefficient: float = 0.001
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})

    def __post_init__(self) -> None:
        require(0 <= self.coefficient < float("inf"), "coefficient", self.coefficient, "must be >= 0 and finite")

    def __call__(self, b: PolicyBatch) -> Tensor:
        entropy = b.masked("entropy")
        if torch.is_grad_enabled() and b.log_prob.requires_grad and not entropy.requires_grad:
            reason = "PolicyBatch.entropy carries no gradient; run the model with entropy_gradient"
            raise ValueError(f"EntropyBonus: {reason}.")
        return -self.coefficient * entropy
