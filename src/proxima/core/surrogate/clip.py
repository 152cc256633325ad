"""The clipped objective, and the plain policy gradient that it bounds."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from proxima.core.loss import TokenLoss
from proxima.core.metrics import SumCount
from proxima.core.ratio import masked_ratio
from proxima.data import PolicyBatch, require


@dataclass(frozen=True)
class PpoClip:
    """Stop rewarding a token once its ratio has left the clip range in the direction the advantage pushes.

        loss_t = max(-A r, -A clip(r, 1 - epsilon_low, 1 + epsilon_high))        r = pi / pi_prox
        with dual_clip c, where A < 0: loss_t = min(loss_t, -A c)

    Args:
        epsilon_low: how far the ratio may fall below 1; in [0, 1].
        epsilon_high: how far it may rise above 1; >= 0, inf allowed. Larger than `epsilon_low` is DAPO's clip-higher (.28).
        dual_clip: bound on the ratio of tokens with a negative advantage, > 1; none: off. verl's default is 3, DAPO's 10.
        b: `log_prob` [N] with gradient and `proximal_log_prob` [N], nats; `advantage` [N], reward units; `loss_mask` [N] bool.
    Returns: TokenLoss of unit "token": `loss` [N]; `keep` [N] bool, False where the clip (either one) has taken the gradient away.
        Metrics: `clip_fraction_low`, `clip_fraction_high`, `clip_fraction_dual`, shares of the loss tokens.
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: A = 0: loss and gradient 0. r exactly on an edge: not clipped. Log-ratios beyond 20 have gradient 0.
    Source: PPO, arXiv 1707.06347, Eq. 7; GRPO 2402.03300; dual clip 1912.09729, Eq. 5; clip-higher, DAPO 2503.14476.
    Differs: TRL does not clamp log-ratios at 20 (T4); its `delta` bounds the ratio for both signs of the advantage (T3), verl's dual clip
        and ours only for A < 0 (P3). AReaL's dual clip is for both signs, without effect where A > 0 (A4).
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    dual_clip: float | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"advantage", "proximal_log_prob"})
    zero_advantage_inert: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 <= self.epsilon_low <= 1, "epsilon_low", self.epsilon_low, "must be in [0, 1]")
        require(self.epsilon_high >= 0, "epsilon_high", self.epsilon_high, "must be >= 0")
        require(self.dual_clip is None or self.dual_clip > 1, "dual_clip", self.dual_clip, "must be > 1, or none")

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        ratio, advantage = masked_ratio(b), b.masked("advantage")
        plain = -advantage * ratio
        loss = torch.maximum(plain, -advantage * ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high))
        low = (advantage < 0) & (ratio < 1 - self.epsilon_low)
        high = (advantage > 0) & (ratio > 1 + self.epsilon_high)
        dual = torch.zeros_like(low)
        if self.dual_clip is not None:
            loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * self.dual_clip), loss)
            dual = (advantage < 0) & (ratio > self.dual_clip)
        metrics = {
            "clip_fraction_low": SumCount.over(low, b.loss_mask),
            "clip_fraction_high": SumCount.over(high, b.loss_mask),
            "clip_fraction_dual": SumCount.over(dual, b.loss_mask),
        }
        return TokenLoss(loss, b.loss_mask & ~(low | high | dual), {**metrics})


@dataclass(frozen=True)
class Reinforce:
    """The plain policy gradient: nothing bounds the update.

        loss_t = -A log pi

    Args:
        b: `log_prob` [N] with gradient, nats; `advantage` [N], reward units; `loss_mask` [N] bool.
    Returns: TokenLoss of unit "token"; `keep` is the loss mask.
    Edge cases: A = 0: loss and gradient 0. No proximal policy is needed; without one the ratio metrics are absent.
    Source: Williams, 1992; GPG, arXiv 2504.02546 (with its own advantage). verl `gpg`. Differs: in nothing.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"advantage"})
    zero_advantage_inert: ClassVar[bool] = True

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        return TokenLoss(-b.masked("advantage") * b.masked("log_prob"), b.loss_mask, {})
