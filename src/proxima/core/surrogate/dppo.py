"""Divergence proximal policy optimization: drop a token if its divergence is too large and the update would grow it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.band import Band, returning
from proxima.core.divergence import divergence, divergence_needs
from proxima.core.loss import Surrogate, TokenLoss
from proxima.core.ratio import Centre, either, ratio_loss, returns_to
from proxima.data import require
from proxima.data.policy_batch import PolicyBatch


@dataclass(frozen=True)
class Dppo(Surrogate):
    """Keep a token while its divergence from the behavior policy is small, or the update reduces it.

        keep_t  iff  A (r - 1) <= 0  or  D_t <= delta        loss_t = keep_t (-A r)        r = pi / pi_prox

    Args:
        divergence: D. `binary_tv` |pi - mu| (a probability), `binary_kl` (nats); `topk_tv`, `topk_kl` over the behavior
            top K, the sampled token and one bucket for the rest: these need the ids `token` [N] and `top_k` [N, K],
            `behavior_top_k_log_prob` and `top_k_log_prob` [N, K] (K = 20 in the paper).
        delta: largest divergence of a token that moves away, > 0, inf allowed. Paper: tv .15 (.20 for 30B-A3B), kl .05.
        delta_low: the same for tokens with A < 0; null: `delta`.
        ratio_cap: c in -A sg(min(r, c)) log pi (verl, TRL), the same gradient for r <= c; null: gradient through r
            (UniRL).
        centre: the policy that D and the direction are measured from: `behavior` (the method) or `proximal` (an
            ablation).
        b: `log_prob` [N] with gradient, `behavior_log_prob`, `proximal_log_prob` [N], nats; `advantage` [N];
            `loss_mask` [N] bool.
    Returns: TokenLoss of unit "token": `loss` [N], 0 where dropped; `keep` [N] bool.
    Edge cases: delta = inf is -A r. A = 0 or r = 1 counts as moving back. D = delta is kept. With `proximal` other than
        `behavior`, r in "A (r - 1)" is relative to the centre.
    Source: arXiv 2602.04879; UniRL `algorithms/dppo.py`. Differs: verl counts A = 0 as a negative advantage and reads
        the cap from `clip_ratio_c`, whose real default is 3 and not the documented 20 (P4); D is in the batch's dtype,
        UniRL's is float32.
    """

    divergence: Literal["binary_tv", "binary_kl", "topk_tv", "topk_kl"] = "binary_tv"
    delta: float = 0.15
    delta_low: float | None = None
    ratio_cap: float | None = None
    centre: Centre = "behavior"
    needs: ClassVar[frozenset[str]] = Surrogate.needs | {"behavior_log_prob"}  # by default; see divergence_needs
    zero_advantage_inert: ClassVar[bool] = True
    unbounded: ClassVar[Mapping[str, Any]] = {"delta": float("inf")}
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "topk": {"divergence": "topk_kl", "delta": 0.02},
        "kl": {"divergence": "binary_kl", "delta": 0.02, "delta_low": 0.01},
        "capped": {"ratio_cap": 1.1},
        "proximal": {"centre": "proximal"},
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", Surrogate.needs | divergence_needs(self.divergence, self.centre))
        require(self.delta > 0, "delta", self.delta, "must be > 0")
        require(self.delta_low is None or self.delta_low > 0, "delta_low", self.delta_low, "must be > 0, or none")
        require(self.ratio_cap is None or self.ratio_cap > 0, "ratio_cap", self.ratio_cap, "must be > 0, or none")

    @property
    def exempt_laws(self) -> frozenset[str]:  # the cap detaches the ratio
        return frozenset() if self.ratio_cap is None else frozenset({"derivative"})

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        far, threshold = self.threshold(b)
        keep = b.loss_mask & (returns_to(b, self.centre) | (far <= threshold))
        return TokenLoss(ratio_loss(b, keep, self.ratio_cap), keep, {})

    def threshold(self, b: PolicyBatch) -> tuple[Tensor, Tensor]:
        """D_t and its bound, [N] each, detached."""
        far = divergence(b, self.divergence, self.centre)
        low = self.delta if self.delta_low is None else self.delta_low
        return far, either(b.masked("advantage") < 0, low, self.delta, far)

    def band(self, b: PolicyBatch) -> Band:
        far, threshold = self.threshold(b)
        return Band.of(
            b,
            f"divergence ({self.divergence}) and its threshold",
            "divergence_measured",
            far,
            upper=torch.where(returns_to(b, self.centre), torch.inf, threshold),
            columns={"threshold": threshold},
            cause=lambda token: ", the threshold of a token",
            free=lambda token: returning(b, self.centre, token),
        )
