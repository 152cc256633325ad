"""Tapered off-policy REINFORCE."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from proxima.core.band import Band
from proxima.core.loss import Surrogate, TokenLoss
from proxima.core.metrics import SumCount
from proxima.core.ratio import LOG_RATIO_LIMIT, either, masked_log_ratio, spread
from proxima.core.segment import segment_sum
from proxima.data import require
from proxima.data.policy_batch import PolicyBatch


@dataclass(frozen=True)
class Topr(Surrogate):
    """Imitate good sequences with full weight, and push bad ones down only while the policy still produces them.

        w = 1 where A >= 0, else min(prod_t r_t, upper)        loss_t = -sg(w) A log pi        r = pi / pi_prox

    Args:
        upper: cap on the weight of a sequence with a negative advantage, > 0; 1 in the paper, inf allowed.
        b: as for `PpoClip`.
    Returns: TokenLoss of unit "sequence"; `keep` [N] bool, False where the cap acts (the token still has a gradient).
        Metric `weight_mean`.
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: A = 0: loss and gradient 0. r = 1 everywhere is `reinforce`. The log of the product is clamped to +-20.
    Source: arXiv 2503.14286, with a- = 0, b- = 1 and a+ = b+ = 1. Its ratio is pi / mu: ours with `proximal: behavior`.
    Differs: the paper decides by the sign of the reward; here it is that of the advantage, so the baseline decides.
    Name: TOPR, tapered off-policy REINFORCE.
    Use it: Batches are old or sampled by another model, and most completions are wrong.
    Not: Single tokens go wrong. Positive sequences have no bound at all, and all tokens of the others share one ratio.
    """

    upper: float = 1.0
    zero_advantage_inert: ClassVar[bool] = True
    exempt_laws: ClassVar[frozenset[str]] = frozenset({"derivative"})  # the weight is detached
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {"wide": {"upper": float("inf")}}

    def __post_init__(self) -> None:
        require(self.upper > 0, "upper", self.upper, "must be > 0")

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        ratio, advantage = self.ratio(b), b.masked("advantage")
        negative = advantage < 0
        weight = ratio.clamp(max=self.upper).where(negative, 1.0)
        keep = b.loss_mask & ~(negative & (ratio > self.upper))
        loss = -advantage * weight * b.masked("log_prob")
        return TokenLoss(loss, keep, {"weight_mean": SumCount.over(weight, b.loss_mask)}, "sequence")

    def ratio(self, b: PolicyBatch) -> Tensor:
        """prod_t r_t, [N], detached: of the sequence of each token."""
        log_weight = segment_sum(masked_log_ratio(b).detach(), b.cu_seqlens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return spread(b, log_weight.exp())

    def band(self, b: PolicyBatch) -> Band:
        ratio = self.ratio(b)
        return Band.of(
            b,
            "ratio of the sequence and the cap of its weight",
            "sequence_ratio",
            ratio,
            upper=either(b.masked("advantage") < 0, self.upper, math.inf, ratio),
            columns={"upper": self.upper},
            verdict="clipped",
            cause=lambda token: ", which is its weight: it still has a gradient",
            free=lambda token: "A >= 0: a good sequence has weight 1, whatever its ratio is",
        )
