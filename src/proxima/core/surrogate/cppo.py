"""Cumulative prefix-divergence policy optimization: the drift of earlier tokens reduces the bound on later ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.divergence import DIVERGENCES, divergence, divergence_needs
from proxima.core.loss import Surrogate, TokenLoss
from proxima.core.metrics import SumCount
from proxima.core.padded_blocks import PaddedBlock, clamped_quantile, map_padded, prefix_sums
from proxima.core.ratio import Centre, ratio_loss
from proxima.core.segment import segment_count
from proxima.data import PolicyBatch, check_choices, require

if TYPE_CHECKING:
    from proxima.core.band import Band


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
        keep, spends = self.masks(b)
        return TokenLoss(ratio_loss(b, keep, None), keep, {"prefix_spend": SumCount.over(spends, b.loss_mask)})

    @torch.no_grad()
    def masks(self, b: PolicyBatch) -> tuple[Tensor, Tensor]:
        """[N] bool each: the loss tokens that are kept, and those for which the prefix term is the smaller one. Besides
        the results, it needs only the memory of one block."""
        sampled = _SampledTokens.of(b)
        assert b.advantage is not None

        def decide(block: PaddedBlock, here: Tensor, there: Tensor, advantage: Tensor, *far: Tensor) -> Tensor:
            weighted, allowed = self._threshold(block, far[0] if far else DIVERGENCES[self.divergence](there, here))
            keep = (weighted <= allowed) | (advantage * (here - there).sign() <= 0)
            return keep.to(torch.uint8).add_((allowed < self.delta).to(torch.uint8), alpha=2)

        log_probs = [sampled.of_batch(x).detach() for x in (b.log_prob, self._centre(b))]
        packed = [*log_probs, sampled.of_batch(b.advantage), *self._far_packed(b, sampled)]
        bits = sampled.spread(map_padded(decide, *sampled.rows, *packed, dtype=torch.uint8), 0)
        return b.loss_mask & (bits & 1).bool(), b.loss_mask & (bits > 1)

    @torch.no_grad()
    def threshold(self, b: PolicyBatch) -> tuple[Tensor, Tensor]:
        """Z_t and c_t, [N] each, detached: the weighted divergence and its bound; 0 and delta where not sampled."""
        sampled = _SampledTokens.of(b)
        far = sampled.of_batch(divergence(b, self.divergence, self.centre))
        weighted, allowed = (
            map_padded(lambda block, far, i=i: self._threshold(block, far)[i], *sampled.rows, far, dtype=far.dtype)
            for i in (0, 1)
        )
        return sampled.spread(weighted, 0.0), sampled.spread(allowed, self.delta)

    def _centre(self, b: PolicyBatch) -> Tensor:
        centre = b.behavior_log_prob if self.centre == "behavior" else b.proximal_log_prob
        assert centre is not None
        return centre.to(b.log_prob.dtype)

    def _far_packed(self, b: PolicyBatch, sampled: "_SampledTokens") -> list[Tensor]:
        """The divergence of every token, if two log-probs are not enough to compute it."""
        if not self.divergence.startswith("topk"):
            return []
        return [sampled.of_batch(divergence(b, self.divergence, self.centre))]

    def _threshold(self, block: PaddedBlock, far: Tensor) -> tuple[Tensor, Tensor]:
        """Z and c of the rows [s, T] of a block. Prefix sums stay in their row, so no precision is lost to others."""
        if block.inside is not None:
            far = torch.where(block.inside, far, 0.0)
        before = torch.arange(block.width, dtype=far.dtype, device=far.device)
        slope = (1 - self.w_min) / (block.count - 1).clamp(min=1).to(far.dtype)[:, None]
        even = block.inside is None  # rows of one length share their weights
        slope = slope[:1] if even else slope
        weight = 1 - slope * before
        if self.single_token == "w_min":
            weight = torch.where((block.count[:1] if even else block.count)[:, None] == 1, self.w_min, weight)
        weighted = far * weight
        allowed = prefix_sums(weighted).sub_(weighted)  # S, what the tokens before have spent
        prior_weight = before - slope * (before * (before - 1) / 2)  # W, the sum of an arithmetic sequence
        granted = self._budget(block, far)[:, None] * prior_weight[:, 1:]  # from the second token on: no inf · 0
        allowed[:, 1:].neg_().add_(granted)
        allowed[:, 0] = 0
        return weighted, allowed.clamp_(max=0).add_(self.delta)

    def _budget(self, block: PaddedBlock, far: Tensor) -> Tensor:
        """[s]: the drift allowed per token of the prefix, by sequence."""
        if self.budget == "static" or self.delta_b == float("inf"):
            return far.new_full((len(far),), self.delta_b)
        return clamped_quantile(far, block, 0.9, self.delta_b, 2 * self.delta_b)

    def band(self, b: PolicyBatch) -> "Band":
        from proxima.core.band import Band, no_bounds, told
        from proxima.core.surrogate.dppo import returning, returns_to

        weighted, threshold = self.threshold(b)
        spent, granted = self._prefix(b)
        lower, unbounded = no_bounds(b)

        def cause(token: int) -> str:
            if float(threshold[token]) >= self.delta:
                return ", the threshold of a token"
            left, right = told(float(spent[token]), float(granted[token]))
            return f" because the prefix had spent {left}, and was granted {right}"

        assert b.sampled is not None
        return Band(
            title="weighted divergence Z, its threshold c, and the budget of the prefix",
            value=torch.where(b.sampled, weighted, torch.nan),
            lower=lower,
            upper=torch.where(returns_to(b, self.centre), unbounded, threshold),
            loss_mask=b.loss_mask,
            names=("weighted_divergence", "", ""),
            columns={"threshold": threshold, "prefix_spent": spent, "prefix_budget": granted},
            cause=cause,
            free=lambda token: returning(b, self.centre, token),
        )

    def _prefix(self, b: PolicyBatch) -> tuple[Tensor, Tensor]:
        """S_{t-1} and budget W_{t-1}, [N] each: the divergence that the prefix of a token has spent, and was granted; 0
        where not sampled."""
        sampled = _SampledTokens.of(b)
        far = sampled.of_batch(divergence(b, self.divergence, self.centre))

        def spent(block: PaddedBlock, rows: Tensor) -> Tensor:
            weighted, _ = self._threshold(block, rows)
            return prefix_sums(weighted) - weighted

        def granted(block: PaddedBlock, rows: Tensor) -> Tensor:
            weight, _ = self._threshold(block, torch.ones_like(rows))  # of a divergence of 1
            inside = rows if block.inside is None else torch.where(block.inside, rows, 0.0)
            prior = prefix_sums(weight) - weight
            return torch.where(prior > 0, self._budget(block, inside)[:, None] * prior, 0.0)  # no inf · 0

        both = [map_padded(part, *sampled.rows, far, dtype=far.dtype) for part in (spent, granted)]
        return sampled.spread(both[0], 0.0), sampled.spread(both[1], 0.0)


@dataclass(frozen=True)
class _SampledTokens:
    """The sampled tokens on their own packed axis: tool tokens have no position and spend no budget."""

    positions: Tensor | None  # [n] int64 on the batch's axis; None if every token is sampled
    rows: tuple[Tensor, Sequence[int]]  # `cu_seqlens` of this axis, and the lengths on the host
    tokens: int

    @classmethod
    def of(cls, b: PolicyBatch) -> "_SampledTokens":
        lengths = b.counts.sampled
        if lengths == b.counts.tokens:
            return cls(None, (b.cu_seqlens, lengths), len(b))
        assert b.sampled is not None
        count = segment_count(b.sampled, b.cu_seqlens)
        positions = torch.nonzero_static(b.sampled, size=sum(lengths)).flatten()
        return cls(positions, (torch.cat([count.new_zeros(1), count.cumsum(0)]), lengths), len(b))

    def of_batch(self, values: Tensor) -> Tensor:
        """[N] → [n]."""
        return values if self.positions is None else values[self.positions]

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """[n] → [N], `fill` at the tokens that were not sampled."""
        if self.positions is None:
            return values
        out = torch.full((self.tokens,), fill, dtype=values.dtype, device=values.device)
        out[self.positions] = values
        return out
