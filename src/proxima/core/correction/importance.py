"""Importance weights w = π_prox / μ: their level, their bounds, and the veto of a single token."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.correction.weight_statistics import (
    CATASTROPHIC,
    PERCENTILES,
    LossTokens,
    distribution,
    mean_of,
    policy_statistics,
    safe_exp,
    sequence_statistics,
)
from proxima.core.loss import Corrected, Correction
from proxima.core.metrics import Metrics, Quantile, SumCount
from proxima.core.segment import segment_count, segment_mean, segment_sum
from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.policy_batch import PolicyBatch

WeightLevel = Literal["token", "sequence", "geometric"]
Bound = Literal["truncate", "clamp", "clip", "none"]
Rejected = Literal["count", "drop"]
Towards = Literal["proximal", "current", "next"]
FIELDS: dict[str, str] = {"proximal": "proximal_log_prob", "current": "log_prob", "next": "next_log_prob"}
PREFIX = "correction/"


@torch.no_grad()
def log_ratio_to(b: PolicyBatch, towards: str = "proximal") -> Tensor:
    """ρ = log π_towards − log μ, [N] float64 nats, detached, unclamped; 0 outside the loss mask."""
    return b.masked(FIELDS[towards]).double() - b.masked("behavior_log_prob").double()


@dataclass(frozen=True)
class Importance(Correction):
    """Weight each token by its probability under the proximal policy relative to the behavior policy, which sampled it.

        rho_t = log pi_prox - log mu        token: w = exp(rho_t)    sequence: w = exp(sum rho)
        geometric: w = exp(mean rho)
        truncate: min(w, upper)    clamp: min(max(w, lower), upper)    clip: w if lower <= w <= upper else 0    none: w

    Args:
        level: `token`, or `sequence` (the product), `geometric` (the mean) over a sequence's loss tokens, one weight
            for all of them.
        bound: `truncate` to at most upper, `clamp` into [lower, upper], `clip` to 0 outside of it, or `none`.
        upper: > 0; >= 1 for `clip` without `lower`. Truncated importance sampling usually takes 2.
        lower: >= 0, <= upper; null: 1 / upper for `clip`, 0 for `clamp`. For `truncate` it changes no weight, only
            the metric fraction_low.
        veto: ratio of a single token, in (0, 1), below which its whole sequence gets weight 0; null: off. Tested on
            unclamped rho.
        normalise: divide the weights by their mean over the loss tokens of the batch (sequence, geometric: over its
            sequences). Needs `core.precompute` to be exact over micro-batches.
        rejected: tokens of weight 0 by clip or veto stay in the denominator (`count`), or leave the loss mask (`drop`,
            needs `core.precompute`).
        apply: False: weights stay 1 and nothing is rejected; the metrics are still reported.
        towards: the numerator. `proximal`; `current`, for a surrogate without its own ratio (verl's bypass mode with
            REINFORCE); or `next`, the version right after the sampling one (segment-wise decoupled PPO), where a token
            whose `next_log_prob` is NaN is rejected and enters no statistic.
        b: `behavior_log_prob` and the numerator's log-prob [N], nats; `loss_mask` [N] bool.
    Returns: Corrected: `weight` [N] detached in the batch's dtype, 0 outside the loss; `keep` [N] bool; `metrics` under
        `correction/`.
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: exponents are clamped at +-20. `proximal: behavior` gives weight 1 everywhere, and so does a log-prob of
        -inf under both policies; under one of them, rho is far beyond the clamp. A sequence without loss tokens enters
        no statistic.
    Source: truncated importance sampling, Ionides 2008; Yao et al. 2025; IcePop (clip at token level); verl rollout
        correction.
    Differs: metrics are of the unbounded weights (verl 0.9.1: of the truncated ones, P28; PR 3694: std and ESS of
        bounded ones, P32); the bounded ones carry `_bounded` or `_applied`. Sequences without loss tokens are not
        counted (P27, P35).
    """

    level: WeightLevel = "token"
    bound: Bound = "truncate"
    upper: float = 2.0
    lower: float | None = None
    veto: float | None = None
    normalise: bool = False
    rejected: Rejected = "count"
    apply: bool = True
    towards: Towards = "proximal"
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "sequence": {"level": "sequence", "bound": "clip", "upper": 1.5, "veto": 0.3},
        "geometric": {"level": "geometric", "bound": "clamp", "upper": 1.2, "lower": 0.9, "normalise": True},
        "normalised": {"normalise": True},
        "drop": {"bound": "clip", "upper": 1.1, "rejected": "drop"},
        "current": {"level": "geometric", "bound": "clamp", "upper": 1.1, "lower": 0.5, "towards": "current"},
        "next": {"towards": "next"},
    }

    def __post_init__(self) -> None:
        check_choices(self)
        require(self.upper > 0, "upper", self.upper, "must be > 0")
        bound = f"must be in [0, upper={self.upper}], or none"
        require(self.lower is None or 0 <= self.lower <= self.upper, "lower", self.lower, bound)
        bound = "must be >= 1 with bound=clip while lower is none, which is 1 / upper: no weight would be left"
        require(self.bound != "clip" or self.floor <= self.upper, "upper", self.upper, bound)
        require(self.veto is None or 0 < self.veto < 1, "veto", self.veto, "must be in (0, 1), or none")
        object.__setattr__(self, "needs", frozenset({"behavior_log_prob", FIELDS[self.towards]}))

    @property
    def whole_batch(self) -> bool:
        return self.normalise or self.rejected == "drop"

    @property
    def floor(self) -> float:
        """The lower bound in effect, also when `lower` is none."""
        if self.lower is not None:
            return self.lower
        if self.bound == "clamp":
            return 0.0
        return 1 / self.upper

    @torch.no_grad()
    def __call__(self, b: PolicyBatch) -> Corrected:
        rho = log_ratio_to(b, self.towards)
        log_w = log_weight(rho, b, self.level)
        weight = torch.where(b.loss_mask, self.bounded(safe_exp(log_w)), 0.0)
        metrics = weight_statistics(log_w, b, self.level, self.upper, self.floor)
        metrics |= applied_statistics(weight, log_w, b)
        tokens = LossTokens.of(b)
        target = b.masked(FIELDS[self.towards])
        metrics |= policy_statistics(tokens.select(rho), tokens.select(target), tokens)
        vetoed = self.vetoed(rho, b)
        nonempty = segment_count(b.loss_mask, b.cu_seqlens) > 0
        metrics["rollout_is_veto_fraction"] = SumCount.over(vetoed, nonempty)
        if self.veto is not None:
            metrics["rollout_is_catastrophic_token_fraction"] = SumCount.over(rho < math.log(self.veto), b.loss_mask)
            weight = torch.where(vetoed[b.sequence_index], 0.0, weight)
        keep = b.loss_mask & (weight > 0)
        if self.normalise:
            mean = self._mean(weight, b, nonempty)
            metrics["rollout_is_batch_norm_factor"] = mean
            weight = weight * (mean.count / mean.sum.clamp(min=1e-300)).clamp(max=1e300)
        if not self.apply:
            weight = b.loss_mask.double()
            keep = b.loss_mask
        prefixed: Metrics = {PREFIX + name: metric for name, metric in metrics.items()}
        return Corrected(weight.to(b.log_prob.dtype), keep, prefixed)

    def bounded(self, weight: Tensor) -> Tensor:
        """The weights [N] within the bounds of this spec."""
        if self.bound == "truncate":
            return weight.clamp(max=self.upper)
        if self.bound == "clamp":
            return weight.clamp(self.floor, self.upper)
        if self.bound == "clip":
            return torch.where((weight >= self.floor) & (weight <= self.upper), weight, 0.0)
        return weight

    def vetoed(self, rho: Tensor, b: PolicyBatch) -> Tensor:
        """[S] bool, the sequences with a loss token below the veto; without a veto (for the metrics) below 1e-4."""
        veto = CATASTROPHIC if self.veto is None else self.veto
        below = b.loss_mask & (rho < math.log(veto))
        return segment_count(below, b.cu_seqlens) > 0

    def _mean(self, weight: Tensor, b: PolicyBatch, nonempty: Tensor) -> SumCount:
        if self.level == "token":
            return SumCount.over(weight, b.loss_mask)
        per_sequence = torch.zeros(b.sequences, dtype=torch.float64, device=weight.device)
        # the weight is the same at each of its loss tokens
        per_sequence = per_sequence.scatter_reduce(0, b.sequence_index, weight, "amax")
        return SumCount.over(per_sequence, nonempty)


@dataclass(frozen=True)
class CapFloor(Importance):
    """`importance` at token level, 0 outside [lower, upper]: AReaL's cap and floor on behavior weights of asynchronous
    training.

    Args, Returns, Raises, Edge cases: as `Importance`. The bounds are inclusive; filtered tokens stay in the
        denominator.
    Source: decoupled PPO, arXiv 2505.24298. AReaL `behave_imp_weight_cap` 5 and floor .2, later
        RejectionSamplingConfig.
    """

    bound: Bound = "clip"
    upper: float = 5.0
    lower: float | None = 0.2


@dataclass(frozen=True)
class Icepop(Importance):
    """`importance` at token level, 0 outside [lower, upper]: tokens on which engine and trainer disagree too much get
    no gradient.

    Args, Returns, Raises, Edge cases: as `Importance`. The bounds are inclusive.
    Source: IcePop (Ling team, 2025), [.5, 5]; verl `rollout_is_threshold: "0.5_5.0"` (P24).
    """

    bound: Bound = "clip"
    upper: float = 5.0
    lower: float | None = 0.5


def log_weight(rho: Tensor, b: PolicyBatch, level: WeightLevel) -> Tensor:
    """[N] the log-weight of each loss token at its level, from ρ [N] (0 outside the loss); the same within a sequence
    except at token level."""
    if level == "token":
        return rho
    if level == "sequence":
        reduce = segment_sum(rho, b.cu_seqlens)
    else:
        reduce = segment_mean(rho, b.loss_mask, b.cu_seqlens)
    return torch.where(b.loss_mask, reduce[b.sequence_index], torch.zeros_like(rho))


def weight_statistics(log_w: Tensor, b: PolicyBatch, level: WeightLevel, upper: float, lower: float) -> Metrics:
    """Distribution of the weights, from their logs [N], and the shares outside the bounds of the correction."""
    tokens = LossTokens.of(b)
    raw = safe_exp(tokens.select(log_w))
    bounded = distribution(raw.clamp(lower, upper))
    row = tokens.means(raw)
    each = row if level == "sequence" else raw  # the weight of a whole sequence counts once
    out: Metrics = {f"rollout_is_{name}": metric for name, metric in distribution(raw).items()}
    out |= {f"rollout_is_{name}_bounded": bounded[name] for name in ("std", "eff_sample_size")}
    out |= {f"rollout_is_{name}": Quantile(raw, q) for name, q in PERCENTILES.items()}
    out |= sequence_statistics(row)
    out |= {
        "rollout_is_ratio_fraction_high": mean_of(each > upper),
        "rollout_is_ratio_fraction_low": mean_of(each < lower),
        "rollout_is_seq_fraction_high": mean_of(row > upper),
        "rollout_is_seq_fraction_low": mean_of(row < lower),
    }
    return out


def applied_statistics(weight: Tensor, log_w: Tensor, b: PolicyBatch) -> Metrics:
    """Statistics of the applied weights, [N], before normalisation; and the shares that a bound has changed."""
    tokens = LossTokens.of(b)
    applied = tokens.select(weight)
    changed = applied != safe_exp(tokens.select(log_w))
    out: Metrics = {f"rollout_is_{name}": metric for name, metric in distribution(applied).items()}
    out |= sequence_statistics(tokens.means(applied))
    metrics: Metrics = {f"{name}_applied": metric for name, metric in out.items()}
    return metrics | {
        "rollout_is_clipped_fraction": mean_of(changed),
        "rollout_is_seq_clipped_fraction": mean_of(tokens.sums(changed.double()) > 0),
    }
