"""Quadratic penalties instead of a clip: no token is dropped; one that has moved too far is pulled back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from proxima.core.band import Band
from proxima.core.loss import Surrogate, TokenLoss
from proxima.core.metrics import SumCount
from proxima.core.ratio import masked_ratio
from proxima.data import require
from proxima.data.policy_batch import PolicyBatch


def _pulled(b: PolicyBatch, probability: Tensor | float, epsilon: float) -> tuple[Tensor, Tensor]:
    """−A r + |A| p (r − 1)² / (2 ε), and its second term alone, [N] each."""
    ratio = masked_ratio(b)
    advantage = b.masked("advantage")
    pull = advantage.abs() * probability * (ratio - 1).square() / (2 * epsilon)
    return pull - advantage * ratio, pull


def _pull_band(b: PolicyBatch, name: str, far: Tensor, epsilon: float) -> Band:
    """The band of a pull that cancels the gradient of a token moving away at distance `epsilon`, and reverses it
    beyond."""
    left = 1 - torch.sign(b.masked("advantage") * (masked_ratio(b) - 1)) * far / epsilon
    title = f"{name} and the distance at which the pull takes the gradient"
    return Band.of(b, title, name, far, columns={"pull_distance": epsilon, "gradient_left": left})


@dataclass(frozen=True)
class Drpo(Surrogate):
    """Pull a token back that has moved too far, in proportion to the distance; no token is dropped.

        loss_t = -A r + |A| mu (r - 1)^2 / (2 epsilon)        r = pi / pi_prox, mu = behavior probability
        d loss_t / d log pi_t = -A r (1 - sgn(A (r - 1)) |pi - mu| / epsilon)        if pi_prox = mu

    Args:
        epsilon: the |pi - mu|, a probability, at which the gradient of such a token is zero; > 0, inf allowed.
        b: `log_prob` [N] with gradient, `proximal_log_prob`, `behavior_log_prob` [N], nats; `advantage` [N], reward
            units; `loss_mask` [N] bool. All at the sampling temperature.
    Returns: TokenLoss of unit "token": `loss` [N], 0 where masked; `keep` [N] bool, equal to `loss_mask`. Metric
        `drpo_pull`: the mean of the second term.
    Edge cases: epsilon = inf is -A r. A = 0: loss and gradient 0. NaN outside the mask has no effect. With `proximal`
        other than `behavior`, mu is still the behavior probability and the gradient formula does not hold.
    Source: UniRL `algorithms/drpo.py`. At the public recipe's 12.5 the bracket stays above .92, a weak pull; try .1 to
        1. Differs: metrics are over the loss tokens of the whole step; UniRL takes a mean per call (U5, U7).
    """

    epsilon: float = 12.5
    needs: ClassVar[frozenset[str]] = Surrogate.needs | {"behavior_log_prob"}
    zero_advantage_inert: ClassVar[bool] = True
    unbounded: ClassVar[Mapping[str, Any]] = {"epsilon": float("inf")}
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {"tight": {"epsilon": 0.1}}

    def __post_init__(self) -> None:
        require(self.epsilon > 0, "epsilon", self.epsilon, "must be > 0")

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        loss, pull = _pulled(b, b.masked("behavior_log_prob").exp(), self.epsilon)
        return TokenLoss(loss, b.loss_mask, {"drpo_pull": SumCount.over(pull, b.loss_mask)})

    def band(self, b: PolicyBatch) -> Band:
        far = b.masked("behavior_log_prob").exp() * (masked_ratio(b) - 1).abs()
        return _pull_band(b, "distance_from_behavior", far, self.epsilon)


@dataclass(frozen=True)
class Spo(Surrogate):
    """`drpo` without the behavior probability: the pull depends on the ratio alone, for rare and common tokens alike.

        loss_t = -A r + |A| (r - 1)^2 / (2 epsilon)        r = pi / pi_prox

    Args:
        epsilon: the |r - 1| at which the gradient of a token that has moved too far is zero; > 0, inf allowed.
        b: `log_prob` [N] with gradient, `proximal_log_prob` [N], nats; `advantage` [N]; `loss_mask` [N] bool.
    Returns, Edge cases: as `Drpo`; the metric is `spo_pull`.
    Source: simple policy optimization, arXiv 2401.16025; UniRL `drpo` with `penalty_mu_weighted: false` (U5).
    """

    epsilon: float = 0.2
    zero_advantage_inert: ClassVar[bool] = True
    unbounded: ClassVar[Mapping[str, Any]] = {"epsilon": float("inf")}

    def __post_init__(self) -> None:
        require(self.epsilon > 0, "epsilon", self.epsilon, "must be > 0")

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        loss, pull = _pulled(b, 1.0, self.epsilon)
        return TokenLoss(loss, b.loss_mask, {"spo_pull": SumCount.over(pull, b.loss_mask)})

    def band(self, b: PolicyBatch) -> Band:
        return _pull_band(b, "distance_of_ratio", (masked_ratio(b) - 1).abs(), self.epsilon)
