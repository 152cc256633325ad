"""Penalties added to the loss per token: the distance from another policy, and an entropy bonus.

A penalty is `towards` a policy x: the frozen reference, or the behavior or proximal policy. With d = log π − log x on
tokens sampled (nearly) from π, `k1`, `k2` and `k3` estimate KL(π‖x); they differ in bias, variance and gradient.
Detached, the same kinds give the KL term of a reward: `core.reward_kl.RewardKl`. A penalty applies to all loss tokens,
including those that the surrogate masks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.loss import Penalty
from proxima.core.metrics import k2, k3
from proxima.core.ratio import LOG_RATIO_LIMIT, masked_ratio
from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.policy_batch import PolicyBatch


@dataclass(frozen=True)
class _Towards(Penalty):
    """coefficient · estimate(d), d = log π − log x, with x the policy that `towards` names."""

    coefficient: float = 0.001
    towards: Literal["behavior", "proximal", "reference"] = field(default="reference", kw_only=True)
    needs: ClassVar[frozenset[str]] = frozenset({"reference_log_prob"})
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "behavior": {"towards": "behavior"},
        "proximal": {"towards": "proximal"},
    }

    def __post_init__(self) -> None:
        require(0 <= self.coefficient < float("inf"), "coefficient", self.coefficient, "must be >= 0 and finite")
        check_choices(self)
        object.__setattr__(self, "needs", frozenset({f"{self.towards}_log_prob"}))

    def __call__(self, b: PolicyBatch) -> Tensor:
        """[N] coefficient · estimate, with gradient, 0 outside the loss."""
        return self.coefficient * self.divergence(b.masked("log_prob"), b.masked(f"{self.towards}_log_prob"))

    def divergence(self, log_prob: Tensor, other_log_prob: Tensor) -> Tensor:
        """[N] the estimate itself, nats, without the coefficient; finite log-probs everywhere."""
        return self.estimate(log_prob - other_log_prob.detach())

    def estimate(self, d: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class _Kl(_Towards):
    straight_through: bool = False
    unbiased: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.straight_through and self.unbiased
        require(not both, "unbiased", self.unbiased, "must be false with straight_through: both correct the gradient")
        if self.unbiased:
            object.__setattr__(self, "needs", self.needs | {"proximal_log_prob"})

    def __call__(self, b: PolicyBatch) -> Tensor:
        value = super().__call__(b)
        if self.unbiased:
            return value * masked_ratio(b)
        return value

    def divergence(self, log_prob: Tensor, other_log_prob: Tensor) -> Tensor:
        d = log_prob - other_log_prob.detach()
        value = self.estimate(d)
        if self.straight_through:
            smooth = k2(d)
            value = value.detach() + smooth - smooth.detach()
        return value


@dataclass(frozen=True)
class K1(_Kl):
    """coefficient · d, d = log π − log x: unbiased as a value; its expected gradient is 0: use it in the reward.

    Args:
        coefficient: >= 0, reward units per nat.
        towards: the policy x: `reference`, frozen, `behavior`, that of the engine, or `proximal`.
        straight_through: keep the value, take the gradient of `k2`, in expectation that of the reverse KL. verl's "+"
            kinds.
        unbiased: multiply by the ratio π / π_prox, with its gradient: unbiased for samples from the proximal policy.
        b: `log_prob` [N] with gradient, the log-prob of `towards` [N] (`unbiased`: `proximal_log_prob` too), nats;
            `loss_mask` [N] bool.
    Returns: [N] with gradient, 0 outside the loss.
    Source: Schulman, "Approximating KL divergence", 2020; verl `k1`/`kl`; `unbiased`: DeepSeek-V3.2, arXiv 2512.02556,
        TRL `use_bias_correction_kl` (T5). Differs: no differences.
    """

    def estimate(self, d: Tensor) -> Tensor:
        return d


@dataclass(frozen=True)
class Abs(_Kl):
    """coefficient · |d|: a distance, not a KL; gradient sign(d), 0 at d = 0. Args, Returns: as `K1`. verl `abs`
    (P22)."""

    def estimate(self, d: Tensor) -> Tensor:
        return d.abs()


@dataclass(frozen=True)
class K2(_Kl):
    """coefficient · ½ d²: a biased value, the gradient of the reverse KL. Args, Returns: as `K1`. verl `k2`/`mse`."""

    def estimate(self, d: Tensor) -> Tensor:
        return k2(d)


@dataclass(frozen=True)
class K3(_Kl):
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
class LogRatioSq(_Towards):
    """coefficient · d², d = log π − log x: pulls a token back in proportion to how far its log-prob has moved.

        penalty_t = coefficient · d²        d penalty_t / d log π_t = 2 · coefficient · d

    Args:
        coefficient: τ, >= 0, reward units per squared nat.
        towards: the policy x; `behavior` is prime-rl's, the policy of the engine.
        b: `log_prob` [N] with gradient, the log-prob of `towards` [N], nats; `loss_mask` [N] bool.
    Returns: [N] with gradient, 0 outside the loss.
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: the log-ratio is not clamped, so the pull grows without bound: a token that the engine found all but
        impossible has the largest gradient of its batch. coefficient = 0: value and gradient 0. It is `k2` of twice the
        coefficient.
    Source: Kimi K2.5, arXiv 2602.02276; prime-rl `kl_tau` of its loss (1e-3 until 2026-09-18, then 0), and its
        distillation loss with 1e-3, always towards the behavior policy and over masked tokens too.
    Differs: the mean of prime-rl is over all tokens of the step; here `aggregate` chooses it.
    Name: Squared log-ratio.
    Use it: Together with a band such as `tv_band`, which leaves a token that it masks without a gradient: this term
        still pulls it back.
    Not: You want an estimate of a KL divergence (use `k3`), or rare tokens matter: their log-probs move far.
    In prime-rl: `trainer.loss.kl_tau`, 1e-3 in both of its losses.
    """

    def estimate(self, d: Tensor) -> Tensor:
        return d.square()


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
