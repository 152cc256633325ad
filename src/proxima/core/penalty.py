"""Penalties: per-token terms added to the loss, times their coefficient. Here: the KL divergence towards the frozen reference.

With d = log π − log π_ref on tokens sampled (nearly) from π, each kind estimates KL(π‖π_ref); they differ in bias, variance and gradient.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from proxima.core.metrics import k3
from proxima.core.ratio import LOG_RATIO_LIMIT
from proxima.data import PolicyBatch, require


@dataclass(frozen=True)
class _ReferenceKl:
    coefficient: float = 0.001
    needs: ClassVar[frozenset[str]] = frozenset({"reference_log_prob"})

    def __post_init__(self) -> None:
        require(0 <= self.coefficient < float("inf"), "coefficient", self.coefficient, "must be >= 0 and finite")

    def __call__(self, b: PolicyBatch) -> Tensor:
        return self.coefficient * self.estimate(b.masked("log_prob") - b.masked("reference_log_prob").detach())

    def estimate(self, d: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class K1(_ReferenceKl):
    """coefficient · d, d = log π − log π_ref: unbiased as a value, but its expected gradient is 0: for the reward, not for the loss.

    Args:
        coefficient: >= 0, reward units a nat.
        b: `log_prob` [N] with gradient, `reference_log_prob` [N], nats; `loss_mask` [N] bool.
    Returns: [N] with gradient, 0 outside the loss. Raises: ValueError at construction, naming field, value and bound.
    Source: Schulman, "Approximating KL divergence", 2020. verl `k1`/`kl`.
    """

    def estimate(self, d: Tensor) -> Tensor:
        return d


@dataclass(frozen=True)
class Abs(_ReferenceKl):
    """coefficient · |d|: a distance, not a KL; gradient sign(d), 0 at d = 0. Args, Returns, Raises: as `K1`. verl `abs` (P22)."""

    def estimate(self, d: Tensor) -> Tensor:
        return d.abs()


@dataclass(frozen=True)
class K2(_ReferenceKl):
    """coefficient · ½ d²: biased as a value; its gradient is that of the reverse KL. Args, Returns, Raises: as `K1`. verl `k2`/`mse`."""

    def estimate(self, d: Tensor) -> Tensor:
        return 0.5 * d.square()


@dataclass(frozen=True)
class K3(_ReferenceKl):
    """coefficient · (exp(−d) − 1 + d): unbiased and ≥ 0 as a value.

    Args, Returns, Raises: as `K1`. Edge cases: d is clamped to ±20, so that the exponential stays finite; beyond, the gradient is 0.
    Source: Schulman 2020; GRPO, arXiv 2402.03300, Eq. 4. verl `k3`/`low_var_kl`, TRL (T5).
    Differs: verl also clamps the result to ±10, which stops the gradient where the policy is farthest from the reference (P22).
    """

    def estimate(self, d: Tensor) -> Tensor:
        return k3(-d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


PENALTIES: dict[str, type] = {"abs": Abs, "k1": K1, "k2": K2, "k3": K3}

__all__ = ["K1", "K2", "K3", "PENALTIES", "Abs"]
