"""Rejections: tokens and sequences that get no gradient; the others keep their weight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.correction.importance import FIELDS, PREFIX, Rejected, Towards, log_ratio_to
from proxima.core.divergence import binary_kl, binary_tv
from proxima.core.loss import Corrected, Correction
from proxima.core.metrics import Metrics, Peak, Spread, SumCount, k3
from proxima.core.ratio import LOG_RATIO_LIMIT, spread
from proxima.core.segment import second_moment_keep, segment_count, segment_mean, segment_sum
from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.policy_batch import PolicyBatch


def bidirectional_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """[N] the larger of KL(p‖q) and KL(q‖p) of this token or any other, nats."""
    return torch.maximum(binary_kl(log_p, log_q), binary_kl(log_q, log_p))


# (log π, log μ) [N] float64 → [N]; `ratio` is exponentiated after it is reduced
STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ratio": torch.sub,
    "k1": lambda pi, mu: mu - pi,
    "k2": lambda pi, mu: 0.5 * (pi - mu).square(),
    "k3": lambda pi, mu: k3(pi - mu),
    "tv": binary_tv,
    "ratio_tv": lambda pi, mu: torch.expm1((pi - mu).clamp(max=LOG_RATIO_LIMIT)).abs(),
    "binary_kl": bidirectional_kl,
}


def as_correction(b: PolicyBatch, keep: Tensor, name: str, metrics: Metrics | None = None) -> Corrected:
    """Weight 1 where kept, 0 elsewhere, with the shares of tokens and sequences rejected under `name`."""
    nonempty = segment_count(b.loss_mask, b.cu_seqlens) > 0
    hit = segment_count(b.loss_mask & ~keep, b.cu_seqlens) > 0
    shares: Metrics = {
        f"{PREFIX}{name}_masked_fraction": SumCount.over(~keep, b.loss_mask),
        f"{PREFIX}{name}_seq_masked_fraction": SumCount.over(hit, nonempty),
    }
    return Corrected(keep.to(b.log_prob.dtype), keep, shares | (metrics or {}))


@dataclass(frozen=True)
class Rejection(Correction):
    """Drop tokens or whole sequences on which behavior and proximal policy disagree too much.

        ratio: exp(rho)    k1: -rho    k2: rho^2 / 2    k3: exp(rho) - 1 - rho        rho = log pi_prox - log mu
        tv: |pi_prox - mu|    ratio_tv: |exp(rho) - 1|
        binary_kl: max(kl(pi_prox, mu), kl(mu, pi_prox))        kl(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q))
        keep  iff  lower <= statistic <= upper, or keep_returning and A rho <= 0
        level sequence: the sum, mean or max of the statistic over the loss tokens

    `tv` is the total variation of two outcomes, this token or another: a change of probability, in [0, 1]. `ratio_tv`
    is an estimate of the vocabulary's: over tokens drawn from mu its mean is sum_v |pi_prox - mu|, twice the total
    variation at the position, which the mean of `tv` is not. A rare token that triples moves `ratio_tv` by 2 and `tv`
    by next to nothing. `binary_kl` is wide for rare tokens too, and narrow for nearly certain ones.

    Args:
        level: `token`, or `sequence`: a sequence out of bounds is dropped whole.
        statistic: `ratio`, `k1`, `k2`, `k3`, `tv`, `ratio_tv` or `binary_kl`. For `ratio` at sequence level rho is
            reduced before exp: `sum` is the sequence's ratio, `mean` the geometric mean.
        reduce: `sum`, `mean` or `max`; ignored at token level.
        upper: of the statistic; > 0, for `ratio` without `lower` >= 1, for `tv` < 1 unless it is a sum. null: 2, and
            0.1 for `binary_kl`; `tv` and `ratio_tv` have no usual value.
        lower: null: 1 / upper for `ratio`, -upper for `k1`, no bound for the others, which are >= 0.
        rejected: rejected tokens stay in the denominator (`count`), or leave the loss mask (`drop`, needs
            `core.precompute`).
        towards: the policy compared with behavior: `proximal`, `current`, or `next`, the version right after the
            sampling one.
        keep_returning: keep a token, or those of a sequence, whose update reduces the distance: A rho <= 0.
        b: `behavior_log_prob` and the other policy's log-prob [N], nats; `loss_mask` [N] bool; with `keep_returning`
            also `advantage` [N].
    Returns: Corrected with weights 0 and 1. Metrics: the statistic's mean, max, min, std, fraction_high, fraction_low,
        and the shares of tokens and sequences it masked, under `correction/rollout_rs_<name>_`, with <name> as verl's
        (`token_k1`, `seq_mean_k3` …).
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: bounds are inclusive. A sequence without loss tokens enters no metric. A = 0 or rho = 0 counts as
        returning. In `binary_kl` 1 - p is at least 1e-8.
    Source: verl `rollout_rs`, AReaL RejectionSamplingConfig(action='mask'); `binary_kl`: KPop (Ring team, 2026), .1;
        `tv` of sequences: trust region masking, arXiv 2512.23075; `ratio_tv` with `keep_returning`: VACO, arXiv
        2603.01365.
    Differs: verl calls `ratio` k1 and tests the reciprocal pi_rollout / pi_train against the user's bounds (P25).
        AReaL's k3 is that of the reciprocal ratio (A3). verl's denominators follow the reduced mask (`drop`), AReaL's
        do not (`count`, A1). AReaL's binary KL clamps probabilities to [1e-8, 1 - 1e-8] in float32, where the latter is
        1, so that a token of probability 1 is NaN and rejected. open-instruct clamps rho at +-10 in `ratio_tv`.
    """

    level: Literal["token", "sequence"] = "token"
    statistic: Literal["ratio", "k1", "k2", "k3", "tv", "ratio_tv", "binary_kl"] = "ratio"
    reduce: Literal["sum", "mean", "max"] = "mean"
    upper: float | None = None
    lower: float | None = None
    rejected: Rejected = "count"
    towards: Towards = "proximal"
    keep_returning: bool = False
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "sequence": {"level": "sequence", "statistic": "k3", "reduce": "max", "upper": 0.1, "rejected": "drop"},
        "k2": {"statistic": "k2", "upper": 0.05},
        "k1": {"level": "sequence", "statistic": "k1", "reduce": "sum", "upper": 0.3},
        "binary_kl": {"statistic": "binary_kl", "upper": 0.01, "keep_returning": True},
        "tv": {"level": "sequence", "statistic": "tv", "reduce": "max", "upper": 0.1, "towards": "current"},
        "ratio_tv": {"level": "sequence", "statistic": "ratio_tv", "upper": 0.1, "keep_returning": True},
    }

    def __post_init__(self) -> None:
        check_choices(self)
        needs = {"behavior_log_prob", FIELDS[self.towards]}
        if self.keep_returning:
            needs.add("advantage")
        object.__setattr__(self, "needs", frozenset(needs))
        bound = f"must be set for {self.statistic}, > 0"
        if self.statistic == "tv":
            bound = "must be set for tv: a probability, below 1"
        chosen = self.upper is not None or self.statistic not in ("tv", "ratio_tv")
        require(chosen, "upper", self.upper, bound)
        require(self.ceiling > 0, "upper", self.upper, "must be > 0")
        bound = f"must be <= upper={self.ceiling}, or none"
        require(self.lower is None or self.lower <= self.ceiling, "lower", self.lower, bound)
        bound = "must be >= 1 for a ratio while lower is none, which is 1 / upper: nothing would be left"
        require(self.floor <= self.ceiling, "upper", self.upper, bound)
        summed = self.level == "sequence" and self.reduce == "sum"
        bound = "must be < 1 for tv, a difference of probabilities: nothing would be rejected"
        require(self.statistic != "tv" or summed or self.ceiling < 1, "upper", self.upper, bound)

    @property
    def ceiling(self) -> float:
        """The upper bound in effect, also when `upper` is none."""
        if self.upper is not None:
            return self.upper
        return 0.1 if self.statistic == "binary_kl" else 2.0

    @property
    def floor(self) -> float:
        """The lower bound in effect, also when `lower` is none."""
        if self.lower is not None:
            return self.lower
        if self.statistic == "ratio":
            return 1 / self.ceiling
        if self.statistic == "k1":
            return -self.ceiling
        return -float("inf")

    @property
    def name(self) -> str:
        """verl's name for the option."""
        kind = "k1" if self.statistic == "ratio" else self.statistic
        if self.level == "token":
            return f"token_{kind}"
        return f"seq_{self.reduce}_{kind}"

    @torch.no_grad()
    def __call__(self, b: PolicyBatch) -> Corrected:
        values = self.values(b)  # [N] or [S]
        inside = (values >= self.floor) & (values <= self.ceiling)
        if self.level == "token":
            where = b.loss_mask
            keep = inside
        else:
            where = segment_count(b.loss_mask, b.cu_seqlens) > 0
            keep = inside[b.sequence_index]
        if self.keep_returning:
            keep = keep | (b.masked("advantage") * log_ratio_to(b, self.towards).sign() <= 0)
        keep = b.loss_mask & keep
        prefix = f"{PREFIX}rollout_rs_{self.name}"
        metrics: Metrics = {
            f"{prefix}_mean": SumCount.over(values, where),
            f"{prefix}_max": Peak.over(values, where),
            f"{prefix}_min": Peak.over(values, where, largest=False),
            f"{prefix}_std": Spread.over(values, where),
            f"{prefix}_fraction_high": SumCount.over(values > self.ceiling, where),
            f"{prefix}_fraction_low": SumCount.over(values < self.floor, where),
        }
        return as_correction(b, keep, f"rollout_rs_{self.name}", metrics)

    def values(self, b: PolicyBatch) -> Tensor:
        """The statistic: [N] at token level, [S] at sequence level; float64."""
        pi = b.masked(FIELDS[self.towards]).detach().double()
        mu = b.masked("behavior_log_prob").detach().double()
        each = STATISTICS[self.statistic](pi, mu)
        if self.level == "sequence":
            each = self._reduced(each, b)
        if self.statistic == "ratio":
            return each.exp()
        return each

    def _reduced(self, each: Tensor, b: PolicyBatch) -> Tensor:
        if self.reduce == "sum":
            return segment_sum(torch.where(b.loss_mask, each, 0.0), b.cu_seqlens)
        if self.reduce == "mean":
            return segment_mean(each, b.loss_mask, b.cu_seqlens)
        nothing = torch.full((b.sequences,), -torch.inf, dtype=each.dtype, device=each.device)
        most = nothing.scatter_reduce(0, b.sequence_index, torch.where(b.loss_mask, each, -torch.inf), "amax")
        return torch.where(most > -torch.inf, most, 0.0)


@dataclass(frozen=True)
class SecondMoment(Correction):
    """Drop the tokens on which behavior and proximal policy disagree most, until the second moment of the rest is small
    enough.

        drop the largest rho^2, rho = log pi_prox - log mu, until the mean over the kept tokens is < threshold

    Args:
        threshold: nats^2, > 0.
        rejected: rejected tokens stay in the denominator (`count`), or leave the loss mask (`drop`, needs
            `core.precompute`).
        b: `behavior_log_prob`, `proximal_log_prob` [N], nats; `loss_mask` [N] bool. Depends on the whole batch: see
            `core.precompute`.
    Returns: Corrected with weights 0 and 1. Raises: ValueError at construction. Edge cases: at least one token is kept.
    Source: M2PO, arXiv 2510.01161, as AReaL applies it (`m2_threshold`); the surrogate `m2po` measures the current
        policy instead.
    """

    threshold: float = 0.04
    rejected: Rejected = "count"
    whole_batch: ClassVar[bool] = True
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {"drop": {"threshold": 0.01, "rejected": "drop"}}

    def __post_init__(self) -> None:
        require(self.threshold > 0, "threshold", self.threshold, "must be > 0")
        check_choices(self)

    @torch.no_grad()
    def __call__(self, b: PolicyBatch) -> Corrected:
        keep = second_moment_keep(log_ratio_to(b).square(), b.loss_mask, self.threshold)
        return as_correction(b, keep, "second_moment")


@dataclass(frozen=True)
class OffPolicySequence(Correction):
    """Drop a sequence with a negative advantage that the current policy has left far behind: pushing it down further
    teaches nothing.

        keep  iff  A >= 0  or  mean_t (log mu - log pi) <= threshold        mean over the loss tokens of the sequence

    Args:
        threshold: nats per token, >= 0.
        rejected: `count`; `drop` would need the current policy before the forward pass.
        b: `log_prob`, `behavior_log_prob`, `advantage` [N]; `loss_mask` [N] bool.
    Returns: Corrected with weights 0 and 1. Raises: ValueError at construction.
    Edge cases: the test is by token on A and by sequence on the divergence, as in TRL. A value equal to the threshold
        is kept.
    Source: DeepSeek-V3.2, arXiv 2512.02556; TRL `off_policy_mask_threshold` (T8).
    """

    threshold: float = 0.5
    rejected: Literal["count"] = "count"
    needs: ClassVar[frozenset[str]] = frozenset({"advantage", "behavior_log_prob"})

    def __post_init__(self) -> None:
        require(self.threshold >= 0, "threshold", self.threshold, "must be >= 0 nats a token")

    @torch.no_grad()
    def __call__(self, b: PolicyBatch) -> Corrected:
        near = self.drift(b) <= self.threshold
        return as_correction(b, b.loss_mask & (near | (b.masked("advantage") >= 0)), "off_policy")

    def drift(self, b: PolicyBatch) -> Tensor:
        """[N] the mean of log mu - log pi over the loss tokens of each token's sequence."""
        behind = b.masked("behavior_log_prob").double() - b.masked("log_prob").double()
        return spread(b, segment_mean(behind, b.loss_mask, b.cu_seqlens))


@dataclass(frozen=True)
class TopEntropy(Correction):
    """Train only on the tokens where the policy was least certain: the decisions, not the words that follow from them.

        keep  iff  H_t >= the (1 - share) quantile of H over the loss tokens of the batch

    Args:
        share: of the loss tokens, in (0, 1].
        rejected: rejected tokens stay in the denominator (`count`), or leave the loss mask (`drop`, needs
            `core.precompute`).
        b: `entropy` [N], nats; `loss_mask` [N] bool. Depends on the whole batch: see `core.precompute`.
    Returns: Corrected with weights 0 and 1. Raises: ValueError at construction. Edge cases: ties at the quantile are
        kept.
    Source: arXiv 2506.01939; TRL `top_entropy_quantile` (T9). Differs: TRL's quantile is float32; here it is in the
        batch's dtype.
    """

    share: float = 0.2
    rejected: Rejected = "count"
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    whole_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, "share", self.share, "must be in (0, 1]")
        check_choices(self)

    @torch.no_grad()
    def __call__(self, b: PolicyBatch) -> Corrected:
        entropy = b.masked("entropy").detach()
        if len(entropy) == 0 or self.share == 1:
            return as_correction(b, b.loss_mask, "top_entropy")
        ordered = torch.where(b.loss_mask, entropy, torch.inf).sort().values  # the loss tokens first: no device sync
        last = (b.loss_mask.sum() - 1).clamp(min=0)
        position = (1 - self.share) * last.double()
        low = position.long()
        below = ordered.take(low)
        above = ordered.take(torch.minimum(low + 1, last))
        edge = torch.lerp(below, above, (position - low).to(entropy.dtype))
        return as_correction(b, b.loss_mask & (entropy >= edge), "top_entropy")
