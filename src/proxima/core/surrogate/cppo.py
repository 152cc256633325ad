"""Cumulative prefix-divergence policy optimization: the drift of earlier tokens reduces the bound on later ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.band import Band, returning, told
from proxima.core.divergence import divergence, divergence_needs
from proxima.core.loss import Surrogate, TokenLoss
from proxima.core.metrics import Metrics, SumCount
from proxima.core.ratio import Centre, ratio_loss, returns_to
from proxima.core.sequence_rows import SequenceRows
from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.policy_batch import PolicyBatch


@dataclass(frozen=True)
class Cppo(Surrogate):
    """Bound each token's divergence by its own threshold and by the budget that its prefix has left.

        D_t = |pi - mu|        w_t = w_min + (1 - w_min)(T - t)/(T - 1)        Z_t = w_t D_t        t = 1 … T, sampled
        S_{t-1} = sum_{j<t} Z_j        W_{t-1} = sum_{j<t} w_j        budget = clamp(P90(D_1 … D_T), delta_b, 2 delta_b)
        c_t = min(delta, delta + budget W_{t-1} - S_{t-1})
        keep_t  iff  A (r - 1) <= 0  or  Z_t <= c_t        loss_t = keep_t (-A r)

    Early tokens are bounded more tightly, because w is largest there: token t alone may move by delta / w_t.

    Args:
        delta: threshold of one token, a probability, > 0, inf allowed. .15 for dense models, .20 for mixtures of
            experts.
        w_min: weight of the last token, in (0, 1].
        delta_b: average drift allowed per token of the prefix, >= 0, inf allowed.
        divergence: D; `binary_tv` is the method, the others (see `Dppo`) replace it in every formula.
        budget: `dynamic`, by the 90th percentile of D, or `static`, delta_b itself.
        single_token: the weight of the only token of a sequence: `one`, or `w_min`, the limit of the printed formula.
        centre: the policy that D and the direction are measured from: `behavior` (the method) or `proximal` (an
            ablation).
        b: `log_prob` [N] with gradient, `behavior_log_prob`, `proximal_log_prob` [N], nats; `advantage` [N];
            `loss_mask`, `sampled` [N] bool.
    Returns: TokenLoss of unit "token": `loss` [N], 0 where dropped; `keep` [N] bool. Metric `prefix_spend`: share of
        loss tokens for which the prefix term is the smaller one in c_t. `threshold(b)` gives Z and c.
    Edge cases: every sampled token has a position and spends budget, even outside the loss or when dropped; tool tokens
        do neither. c_t may be negative. A = 0 or r = 1 counts as moving back.
        Limits: delta = delta_b = inf is -A r; delta_b = inf and w_min = 1 is `dppo`.
    Source: arXiv 2606.10968; UniRL `algorithms/cppo.py`. Differs: for T = 1 the paper's formula gives w = w_min, the
        authors' code and ours 1, see `single_token` (U1). The authors' README reverses "tight early". UniRL's masked
        fraction ignores the loss mask (U7).
    """

    delta: float = 0.15
    w_min: float = 0.8
    delta_b: float = 0.02
    divergence: Literal["binary_tv", "binary_kl", "topk_tv", "topk_kl"] = "binary_tv"
    budget: Literal["dynamic", "static"] = "dynamic"
    single_token: Literal["one", "w_min"] = "one"
    centre: Centre = "behavior"
    needs: ClassVar[frozenset[str]] = Surrogate.needs | {"behavior_log_prob"}  # by default; see divergence_needs
    zero_advantage_inert: ClassVar[bool] = True
    unbounded: ClassVar[Mapping[str, Any]] = {"delta": float("inf"), "delta_b": float("inf")}
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "static": {"budget": "static", "single_token": "w_min"},
        "kl": {"divergence": "binary_kl", "delta": 0.02, "delta_b": 0.002},
        "topk": {"divergence": "topk_tv"},
        "proximal": {"centre": "proximal"},
    }

    def __post_init__(self) -> None:
        require(self.delta > 0, "delta", self.delta, "must be > 0")
        require(0 < self.w_min <= 1, "w_min", self.w_min, "must be in (0, 1]")
        require(self.delta_b >= 0, "delta_b", self.delta_b, "must be >= 0")
        object.__setattr__(self, "needs", Surrogate.needs | divergence_needs(self.divergence, self.centre))
        check_choices(self)

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        weighted, allowed = self.threshold(b)
        keep = b.loss_mask & (returns_to(b, self.centre) | (weighted <= allowed))
        metrics: Metrics = {"prefix_spend": SumCount.over(allowed < self.delta, b.loss_mask)}
        return TokenLoss(ratio_loss(b, keep, None), keep, metrics)

    def threshold(self, b: PolicyBatch) -> tuple[Tensor, Tensor]:
        """Z_t and c_t, [N] each, detached: the weighted divergence and its bound; 0 and delta where not sampled."""
        weighted, spent, granted = self.prefixes(b)
        return weighted, self.allowed(spent, granted)

    def allowed(self, spent: Tensor, granted: Tensor) -> Tensor:
        """c_t from what the prefix has spent and was granted."""
        return self.delta + (granted - spent).clamp(max=0)

    @torch.no_grad()
    def prefixes(self, b: PolicyBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Z_t, S_{t-1} and budget W_{t-1}, [N] each: the weighted divergence of a token, and what its prefix has spent
        and was granted; 0 where not sampled. Sums stay in their row, so no precision is lost to others."""
        assert b.sampled is not None
        rows = SequenceRows.of(b.sampled, b.cu_seqlens, b.counts.sampled)
        measured = divergence(b, self.divergence, self.centre)
        far, before = measured[rows.tokens], rows.column.to(measured.dtype)
        slope = ((1 - self.w_min) / (rows.count - 1).clamp(min=1).to(far.dtype))[rows.row]
        weight = 1 - slope * before
        if self.single_token == "w_min":
            weight = torch.where(rows.count[rows.row] == 1, self.w_min, weight)
        weighted = far * weight
        spent = rows.prefix_sums(weighted) - weighted
        prior_weight = before - slope * (before * (before - 1) / 2)  # W, the sum of an arithmetic sequence
        granted = torch.where(before > 0, self._budget(rows, far) * prior_weight, 0.0)  # no inf · 0
        weighted, spent, granted = (rows.packed(values, measured) for values in (weighted, spent, granted))
        return weighted, spent, granted

    def _budget(self, rows: SequenceRows, far: Tensor) -> Tensor | float:
        """[n]: the drift allowed per token of the prefix."""
        if self.budget == "static" or self.delta_b == float("inf"):
            return self.delta_b
        return rows.quantile(far, 0.9).clamp(self.delta_b, 2 * self.delta_b).to(far.dtype)[rows.row]

    def band(self, b: PolicyBatch) -> Band:
        weighted, spent, granted = self.prefixes(b)
        threshold = self.allowed(spent, granted)

        def cause(token: int) -> str:
            if float(threshold[token]) >= self.delta:
                return ", the threshold of a token"
            left, right = told(float(spent[token]), float(granted[token]))
            return f" because the prefix had spent {left}, and was granted {right}"

        assert b.sampled is not None
        return Band(
            title="weighted divergence Z, its threshold c, and the budget of the prefix",
            name="weighted_divergence",
            value=torch.where(b.sampled, weighted, torch.nan),
            lower=torch.full_like(weighted, -torch.inf),
            upper=torch.where(returns_to(b, self.centre), torch.inf, threshold),
            loss_mask=b.loss_mask,
            columns={"threshold": threshold, "prefix_spent": spent, "prefix_budget": granted},
            cause=cause,
            free=lambda token: returning(b, self.centre, token),
        )
