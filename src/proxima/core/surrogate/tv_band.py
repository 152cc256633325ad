"""A band of probabilities around the behavior policy, whatever the sign of the advantage."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from proxima.core.band import Band
from proxima.core.divergence import divergence
from proxima.core.loss import Surrogate, TokenLoss
from proxima.core.metrics import Metrics, SumCount
from proxima.core.ratio import ratio_loss, returns_to
from proxima.data import require
from proxima.data.policy_batch import PolicyBatch


@dataclass(frozen=True)
class TvBand(Surrogate):
    """Drop a token whose probability is far from the behavior policy's, even if the update would move it back.

        keep_t  iff  |pi_t - mu_t| <= epsilon        loss_t = keep_t (-A r)        r = pi / pi_prox

    Args:
        epsilon: half width of the band, a probability, > 0; from 1 on it drops nothing, inf allowed.
        b: `log_prob` [N] with gradient, `behavior_log_prob`, `proximal_log_prob` [N], nats; `advantage` [N];
            `loss_mask` [N] bool.
    Returns: TokenLoss of unit "token": `loss` [N], 0 where dropped; `keep` [N] bool. Metrics, shares of the loss
        tokens: `band_above`, `band_below`, dropped with pi > mu or pi < mu, and `band_returning`, dropped although
        A (pi - mu) <= 0, so that `dppo` of the same bound would keep them.
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: |pi - mu| = epsilon is kept. A = 0: loss and gradient 0; outside the band it counts as dropped and
        returning. A dropped token has no gradient, so nothing pulls it back; the penalty `log_ratio_sq` does. With
        `proximal` other than `behavior`, the band is still around mu.
    Source: `ipo_loss_fn` of prime-rl, its default since 2026-08-27 (epsilon .1, since 2026-09-18 .3). IPO, the loss
        over pairs of completions, is another method.
    Differs: `dppo` is one-sided: it keeps tokens that move back. prime-rl up to 559b447 (2026-08-21) computes r
        unclamped, so that a dropped token of a very large ratio gives 0 times inf; newer versions cap it. Here log r is
        clamped to +-20. prime-rl's r is pi / mu, ours with `proximal: behavior`.
    Name: Total-variation band.
    Use it: Asynchronous training, or an engine that disagrees with the trainer. A token far from mu is then more often
        a wrong log-prob than a large step, and the direction of its update says little.
    Not: Several updates share a batch. A token that left the band stays out until other tokens bring it back; `dppo`
        lets its own update do that.
    In prime-rl: `trainer.loss.type: ipo`, `trainer.loss.ipo_threshold` (.1; later `eps`), with `kl_tau`.
    """

    epsilon: float = 0.3
    needs: ClassVar[frozenset[str]] = Surrogate.needs | {"behavior_log_prob"}
    zero_advantage_inert: ClassVar[bool] = True
    unbounded: ClassVar[Mapping[str, Any]] = {"epsilon": float("inf")}
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {"tight": {"epsilon": 0.05}}

    def __post_init__(self) -> None:
        require(self.epsilon > 0, "epsilon", self.epsilon, "must be > 0")

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        keep = b.loss_mask & (divergence(b, "binary_tv") <= self.epsilon)
        dropped = b.loss_mask & ~keep
        above = dropped & (b.masked("log_prob").detach() > b.masked("behavior_log_prob"))
        parts = {"above": above, "below": dropped & ~above, "returning": dropped & returns_to(b, "behavior")}
        metrics: Metrics = {f"band_{name}": SumCount.over(part, b.loss_mask) for name, part in parts.items()}
        return TokenLoss(ratio_loss(b, keep, None), keep, metrics)

    def band(self, b: PolicyBatch) -> Band:
        advantage, back = b.masked("advantage"), returns_to(b, "behavior")

        def cause(token: int) -> str:
            if float(advantage[token]) == 0:
                return ", on either side of μ; the advantage is 0"
            return ", on either side of μ" + (": also a token that would move back" if back[token] else "")

        title, far = "distance |π − μ| and the half width of the band", divergence(b, "binary_tv")
        bound = {"upper": self.epsilon}
        return Band.of(b, title, "distance_from_behavior", far, **bound, columns=bound, cause=cause)
