"""Masks by divergence from the behavior policy.

dppo       drop a token if its divergence is too large and the update would grow it
cppo       the same, where the drift of earlier tokens reduces the bound on later ones
tv_band    drop a token outside a band of probabilities, whatever the sign of its advantage
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.band import Band, format_distinct, returning
from proxima.core.divergence import divergence, divergence_needs
from proxima.core.loss import Surrogate, TokenLoss
from proxima.core.metrics import Metrics, SumCount
from proxima.core.ratio import Centre, either, ratio_loss, returns_to
from proxima.core.segment import SequenceRows
from proxima.data import require
from proxima.data.field_checks import check_choices
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
    bounds: ClassVar[tuple[str, ...]] = ("delta", "delta_low")
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
        if self.ratio_cap is None:
            return frozenset()
        return frozenset({"derivative"})

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        far, threshold = self.threshold(b)
        keep = b.loss_mask & (returns_to(b, self.centre) | (far <= threshold))
        return TokenLoss(ratio_loss(b, keep, self.ratio_cap), keep, {})

    def threshold(self, b: PolicyBatch) -> tuple[Tensor, Tensor]:
        """D_t and its bound, [N] each, detached."""
        far = divergence(b, self.divergence, self.centre)
        falling = b.masked("advantage") < 0
        low = self.delta if self.delta_low is None else self.delta_low
        return far, either(falling, low, self.delta, far)

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
    bounds: ClassVar[tuple[str, ...]] = ("delta", "delta_b")
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
        far = measured[rows.tokens]
        before = rows.column.to(measured.dtype)
        steps = (rows.count - 1).clamp(min=1).to(far.dtype)
        slope = ((1 - self.w_min) / steps)[rows.row]
        weight = 1 - slope * before
        if self.single_token == "w_min":
            weight = torch.where(rows.count[rows.row] == 1, self.w_min, weight)
        weighted = far * weight
        spent = rows.prefix_sums(weighted) - weighted
        prior_weight = before - slope * (before * (before - 1) / 2)  # W, the sum of an arithmetic sequence
        granted = torch.where(before > 0, self._budget(rows, far) * prior_weight, 0.0)  # no inf · 0
        return rows.packed(weighted, measured), rows.packed(spent, measured), rows.packed(granted, measured)

    def _budget(self, rows: SequenceRows, far: Tensor) -> Tensor | float:
        """[n]: the drift allowed per token of the prefix."""
        if self.budget == "static" or self.delta_b == float("inf"):
            return self.delta_b
        of_sequence = rows.quantile(far, 0.9).clamp(self.delta_b, 2 * self.delta_b)
        return of_sequence.to(far.dtype)[rows.row]

    def band(self, b: PolicyBatch) -> Band:
        weighted, spent, granted = self.prefixes(b)
        threshold = self.allowed(spent, granted)

        def cause(token: int) -> str:
            if float(threshold[token]) >= self.delta:
                return ", the threshold of a token"
            left, right = format_distinct(float(spent[token]), float(granted[token]))
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


@dataclass(frozen=True)
class TvBand(Surrogate):
    """Drop a token whose probability is far from the behavior policy's, even if the update would move it back.

        keep_t  iff  |pi_t - mu_t| <= epsilon        loss_t = keep_t (-A r)        r = pi / pi_prox

    Args:
        epsilon: half width of the band, a probability, > 0; at 1 or above it drops nothing, inf allowed.
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
    bounds: ClassVar[tuple[str, ...]] = ("epsilon",)
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
        advantage = b.masked("advantage")
        back = returns_to(b, "behavior")

        def cause(token: int) -> str:
            if float(advantage[token]) == 0:
                return ", on either side of μ; the advantage is 0"
            if back[token]:
                return ", on either side of μ: also a token that would move back"
            return ", on either side of μ"

        title = "distance |π − μ| and the half width of the band"
        far = divergence(b, "binary_tv")
        columns = {"upper": self.epsilon}
        return Band.of(b, title, "distance_from_behavior", far, upper=self.epsilon, columns=columns, cause=cause)
