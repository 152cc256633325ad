"""Cumulative prefix-divergence policy optimization: what earlier tokens have drifted is taken from what a later one may."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.divergence import divergence, divergence_needs
from proxima.core.loss import TokenLoss
from proxima.core.metrics import SumCount
from proxima.core.segment import clamped_quantile, exclusive_cumsum, segment_count
from proxima.core.surrogate.dppo import Centre, ratio_loss, returns_to
from proxima.data import PolicyBatch, require


@dataclass(frozen=True)
class Cppo:
    """Bound each token's divergence by a threshold of its own and by what the prefix before it has left over.

        D_t = |pi - mu|        w_t = w_min + (1 - w_min)(T - t)/(T - 1)        Z_t = w_t D_t        t = 1 … T over the sampled tokens
        S_{t-1} = sum_{j<t} Z_j        W_{t-1} = sum_{j<t} w_j        budget = clamp(P90(D_1 … D_T), delta_b, 2 delta_b)
        c_t = min(delta, delta + budget W_{t-1} - S_{t-1})
        keep_t  iff  A (r - 1) <= 0  or  Z_t <= c_t        loss_t = keep_t (-A r)

    Early tokens are held tighter (w is largest there): token t alone may move delta / w_t.

    Args:
        delta: threshold of one token, a probability, > 0, inf allowed. .15 for dense models, .20 for mixtures of experts.
        w_min: weight of the last token, in (0, 1].
        delta_b: average drift granted to each token of the prefix, >= 0, inf allowed.
        divergence: D; `binary_tv` is the method, the others (see `Dppo`) take its place in every formula.
        budget: `dynamic` as above; `static` is delta_b itself.
        single_token: the weight of the only token of a sequence: `one`, or `w_min` (the printed formula read as its limit).
        centre: the policy that D and the direction are measured from. `behavior` is the method; `proximal` an ablation.
        b: `log_prob` [N] with gradient, `behavior_log_prob`, `proximal_log_prob` [N], nats; `advantage` [N];
            `loss_mask`, `sampled` [N] bool.
    Returns: TokenLoss of unit "token": `loss` [N], 0 where dropped; `keep` [N] bool. Metric `prefix_spend`: share of loss tokens
        for which the prefix term is the smaller one in c_t. `threshold(b)` gives Z and c themselves.
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: all sampled tokens take a position and spend, those outside the loss too; tool tokens do neither. A dropped token still
        spends. c_t may be negative. A = 0 or r = 1 counts as moving back.
        Limits: delta = delta_b = inf is -A r; delta_b = inf and w_min = 1 is `dppo`.
    Source: arXiv 2606.10968; UniRL `algorithms/cppo.py`. Differs: the paper's formula gives w = w_min for T = 1, the authors' code 1; so do
        we, see `single_token` (U1). Prefix sums are float64 whatever the batch's dtype, UniRL's float32. The prose of the authors'
        README has "tight early" the wrong way round. UniRL's masked fraction ignores the loss mask (U7).
    """

    delta: float = 0.15
    w_min: float = 0.8
    delta_b: float = 0.02
    divergence: Literal["binary_tv", "binary_kl", "topk_tv", "topk_kl"] = "binary_tv"
    budget: Literal["dynamic", "static"] = "dynamic"
    single_token: Literal["one", "w_min"] = "one"
    centre: Centre = "behavior"
    needs: ClassVar[frozenset[str]] = frozenset({"advantage", "behavior_log_prob", "proximal_log_prob"})  # and top-k for topk_*
    zero_advantage_inert: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.delta > 0, "delta", self.delta, "must be > 0")
        require(0 < self.w_min <= 1, "w_min", self.w_min, "must be in (0, 1]")
        require(self.delta_b >= 0, "delta_b", self.delta_b, "must be >= 0")
        object.__setattr__(self, "needs", type(self).needs | divergence_needs(self.divergence, self.centre))
        require(self.budget in ("dynamic", "static"), "budget", self.budget, "must be dynamic or static")
        require(self.single_token in ("one", "w_min"), "single_token", self.single_token, "must be one or w_min")

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        weighted, allowed = self.threshold(b)
        keep = b.loss_mask & (returns_to(b, self.centre) | (weighted <= allowed))
        return TokenLoss(ratio_loss(b, keep, None), keep, {"prefix_spend": SumCount.over(allowed < self.delta, b.loss_mask)})

    @torch.no_grad()
    def threshold(self, b: PolicyBatch) -> tuple[Tensor, Tensor]:
        """Z_t and c_t, [N] each, detached: what the token has moved, weighted, and what it may. Z is 0 where not sampled."""
        assert b.sampled is not None
        far = divergence(b, self.divergence, self.centre)
        count = segment_count(b.sampled, b.cu_seqlens)
        if bool(b.sampled.all()):  # the common case: the position in the sequence, no prefix sum needed
            before = torch.arange(len(b), device=far.device) - b.cu_seqlens[:-1].long()[b.sequence_index]
        else:
            before = exclusive_cumsum(b.sampled, b.cu_seqlens).round_().long()
        slope = (1 - self.w_min) / (count - 1).clamp(min=1).double()
        slope = slope[b.sequence_index]
        weight = 1 - slope * before
        if self.single_token == "w_min":
            weight = torch.where((count == 1)[b.sequence_index], self.w_min, weight)
        weighted = far * weight.to(far.dtype)
        spent = exclusive_cumsum(weighted, b.cu_seqlens)
        prior_weight = before - slope * (before * (before - 1) / 2)  # W: the sum of an arithmetic sequence
        granted = torch.where(before > 0, self._budget(b, far)[b.sequence_index] * prior_weight, 0.0)  # inf · 0 is 0 here
        return weighted, (self.delta + (granted - spent).clamp(max=0)).to(far.dtype)

    def _budget(self, b: PolicyBatch, far: Tensor) -> Tensor:
        """[S]: the drift that each token of the prefix is granted, by sequence."""
        assert b.sampled is not None
        if self.budget == "static" or self.delta_b == float("inf"):
            return far.new_full((b.sequences,), self.delta_b)
        return clamped_quantile(far, b.sampled, b.cu_seqlens, 0.9, self.delta_b, 2 * self.delta_b)
