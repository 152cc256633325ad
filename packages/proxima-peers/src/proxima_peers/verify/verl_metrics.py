"""verl's metrics, computed from ours: those of its policy losses, and of weights, rejections and policies in each
generation.

Includes verl's own definitions: averages over all rows, empty ones included (P27, P35), extremes of sequences without
a clamp from below (P28), and the spread that a denominator of n + 1e-8 leaves in equal weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from proxima.core.correction.importance import PREFIX, Importance, log_ratio_to, log_weight
from proxima.core.correction.rejection import Rejection
from proxima.core.divergence import DIVERGENCES
from proxima.core.loss import Corrected
from proxima.core.metrics import Metrics, Peak, Spread, SumCount
from proxima.core.ratio import LOG_RATIO_LIMIT, masked_log_ratio, masked_ratio
from proxima.core.segment import segment_count, segment_mean, segment_sum
from proxima.core.surrogate.clip import Gspo, PpoClip
from proxima.core.surrogate.cppo import Dppo
from proxima.core.surrogate.weight import Cispo, GeoMean, Sapo
from proxima.core.surrogate.whole_batch import ClipCov, KlCov
from proxima.data.policy_batch import PolicyBatch
from proxima_peers.verify.record import Check, Record

EPSILON = 1e-8  # in verl's masked means
# verl's names for our statistics. Its first two generations report unbounded weights, but std and ESS of bounded ones
# (P32); 0.9 reports the weights that it applies (P28). `seq_*` are statistics of the sequences' mean weights.
OF_ROWS = ("seq_mean", "seq_std", "seq_max", "seq_min", "seq_max_deviation")
OF_BOTH = ("ratio_fraction_high", "ratio_fraction_low", "seq_fraction_high", "seq_fraction_low")
FRACTIONS = ("veto_fraction", "catastrophic_token_fraction", "clipped_fraction", "seq_clipped_fraction")
QUANTILES = ("p25", "p50", "p75", "p95", "p99")
RAW = {name: name for name in ("mean", "max", "min", *OF_ROWS, *OF_BOTH, *QUANTILES, *FRACTIONS, "batch_norm_factor")}
RAW |= {"std": "std_bounded", "eff_sample_size": "eff_sample_size_bounded"}
APPLIED = {name: f"{name}_applied" for name in ("mean", "std", "eff_sample_size", "max", "min", *OF_ROWS)}
APPLIED |= {name: name for name in (*OF_BOTH, "batch_norm_factor")}
APPLIED["oob_ratio"] = "clipped_fraction"
POLICY = ("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "ppl_ratio", "log_ppl_diff")
POLICY_ROWS = (*POLICY, "log_ppl_diff_max", "log_ppl_diff_min", "chi2_seq", "log_ppl_abs_diff")
POLICY_TOKENS = ("kl", "k3_kl", "chi2_token")
CLAMPED = (PpoClip, Dppo, Sapo, Cispo)  # verl bounds these log-ratios at ±20 before it averages them


@torch.no_grad()
def actor_numbers(spec: Any, b: PolicyBatch) -> Metrics:
    """verl's metrics for our `spec`, under their bare names, over the loss mask of `b`."""
    mask = b.loss_mask
    log_ratio = masked_log_ratio(b)
    if isinstance(spec, CLAMPED):
        gap = -log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    elif isinstance(spec, KlCov):  # the mean |log-ratio| (P9)
        gap = log_ratio.abs()
    else:
        gap = -log_ratio
    none = SumCount.over(torch.zeros_like(mask), mask)
    numbers: Metrics = {"ppo_kl": SumCount.over(gap, mask), "pg_clipfrac": none, "pg_clipfrac_lower": none}
    if isinstance(spec, PpoClip | Gspo):
        own = spec(b).metrics
        low = own["clip_fraction_low"]
        high = own["clip_fraction_high"]
        assert isinstance(low, SumCount)
        assert isinstance(high, SumCount)
        both = low + high  # shares of the same tokens
        numbers["pg_clipfrac"] = replace(both, count=both.count / 2)
        numbers["pg_clipfrac_lower"] = own["clip_fraction_dual"]
        ratio = masked_ratio(b)
        advantage = b.masked("advantage")
        bounded = ratio.clamp(1 - spec.epsilon_low, 1 + spec.epsilon_high)
        on_the_edge = (ratio != bounded) & ((ratio - bounded).abs() < 1e-12)
        if bool(on_the_edge.any()):
            # Exactly on the edge, it matters whether the products with the advantage round to the same number.
            numbers["pg_clipfrac"] = SumCount.over(-advantage * bounded > -advantage * ratio, mask)
    elif isinstance(spec, ClipCov):
        numbers["pg_clipfrac"] = spec(b).metrics["selected_fraction"]
    elif isinstance(spec, Cispo):
        numbers["pg_clipfrac"] = SumCount.over(~spec(b).keep, mask)
    elif isinstance(spec, GeoMean):  # tokens outside the range on either side, by the sign of A
        far = log_ratio != log_ratio.clamp(-spec.epsilon_low, spec.epsilon_high)
        advantage = b.masked("advantage")
        numbers["pg_clipfrac"] = SumCount.over(far & (advantage > 0), mask)
        numbers["pg_clipfrac_lower"] = SumCount.over(far & (advantage < 0), mask)
    elif isinstance(spec, Dppo):
        valid = _valid(spec, b)
        cap = math.inf if spec.ratio_cap is None else spec.ratio_cap
        numbers["pg_clipfrac"] = SumCount.over(~valid, mask)
        numbers["pg_clipfrac_lower"] = SumCount.over(valid & (masked_ratio(b) > cap), mask)
    return numbers


def _valid(spec: Dppo, b: PolicyBatch) -> Tensor:
    """[N] bool: verl's keep mask, in which A = 0 counts as a negative advantage (P4)."""
    log_q = b.masked("log_prob")
    log_p = b.masked("behavior_log_prob")
    far = DIVERGENCES[spec.divergence](log_p, log_q)
    low = spec.delta if spec.delta_low is None else spec.delta_low
    rises = (far <= spec.delta) | (log_q <= log_p)
    falls = (far <= low) | (log_q >= log_p)
    return torch.where(b.masked("advantage") > 0, rises, falls)


def own(corrected: Corrected) -> Metrics:
    """Our metrics of a correction, without their prefix and with verl's spelling."""
    numbers = {name.removeprefix(PREFIX): metric for name, metric in corrected.metrics.items()}
    if "log_ppl_diff_abs" in numbers:
        numbers["log_ppl_abs_diff"] = numbers.pop("log_ppl_diff_abs")
    return numbers


def policy_numbers(b: PolicyBatch, filled: PolicyBatch | None, towards: Any = "proximal") -> Metrics:
    """KL, χ² and perplexities. `filled`: the batch with a token of log-prob 0 in each empty row, as in verl (P27)."""
    spec = Importance(apply=False, towards=towards)
    here = own(spec(b))
    rows = here if filled is None else own(spec(filled))
    return {name: here[name] for name in POLICY_TOKENS} | {name: rows[name] for name in POLICY_ROWS}


def weight_numbers(
    spec: Importance,
    b: PolicyBatch,
    filled: PolicyBatch | None,
    names: Mapping[str, str],
    *,
    fractions_of_rows: bool = False,
) -> Metrics:
    """Statistics of weights under verl's bare names (`mean`, `seq_std` …).

    Args:
        filled: as for `policy_numbers`; None leaves empty rows out, as ours does.
        names: RAW or APPLIED.
        fractions_of_rows: count geometric weights beyond the bounds by sequence (0.7's rejections), not by token.
    """
    ours_of = own(spec(b))
    statistics = {theirs: ours_of.get(f"rollout_is_{ours}") for theirs, ours in names.items()}
    out: Metrics = {name: metric for name, metric in statistics.items() if metric is not None}
    every = torch.ones_like(b.cu_seqlens[1:], dtype=torch.bool)
    if spec.level != "token":
        extremes_of = b if filled is None else filled
        out |= _whole(spec, extremes_of, rows=fractions_of_rows or spec.level == "sequence")
    if spec.veto is None:  # ours then counts against its own threshold
        none = SumCount.over(~every, every)
        out |= {"veto_fraction": none, "catastrophic_token_fraction": none}
    if filled is None:
        return out
    rho = log_ratio_to(b, spec.towards)
    clamped = log_weight(rho, b, spec.level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    raw = torch.where(b.loss_mask, clamped.exp(), 0.0)
    weight = spec.bounded(raw) if names is APPLIED else raw
    row = segment_mean(weight, b.loss_mask, b.cu_seqlens)  # 0 for an empty row
    unbounded = segment_mean(raw, b.loss_mask, b.cu_seqlens)
    out["seq_mean"] = SumCount.over(row, every)
    out["seq_std"] = Spread.over(row, every, "sample_std")
    out["seq_max"] = Peak.over(row, every)
    out["seq_min"] = Peak.over(row, every, largest=False)
    out["seq_max_deviation"] = Peak.over((row - 1).abs(), every)
    out["seq_fraction_high"] = SumCount.over(unbounded > spec.upper, every)
    out["seq_fraction_low"] = SumCount.over(unbounded < spec.floor, every)
    if "veto_fraction" in out:
        out["veto_fraction"] = of_all(out["veto_fraction"], len(every))
    clipped = "seq_clipped_fraction"
    if clipped in out and spec.level == "token":  # an empty row has no token to be clipped
        out[clipped] = of_all(out[clipped], len(every))
    elif clipped in out:  # but it has a ratio of 1
        out[clipped] = own(spec(filled))["rollout_is_seq_clipped_fraction"]
    return out


def of_all(metric: Any, rows: int) -> SumCount:
    """Convert a share of the non-empty rows to a share of all rows."""
    return SumCount(metric.sum, torch.tensor(float(rows), dtype=torch.float64))


def _whole(spec: Importance, b: PolicyBatch, *, rows: bool) -> Metrics:
    """Extremes of the sequences' ratios, bounded only from above (P28); with `rows`, also the shares out of bounds."""
    rho = log_ratio_to(b, spec.towards)
    some = segment_count(b.loss_mask, b.cu_seqlens) > 0
    log_row = segment_mean(rho, b.loss_mask, b.cu_seqlens)
    if spec.level == "sequence":
        log_row = segment_sum(rho, b.cu_seqlens)
    out: Metrics = {"max": Peak.over(log_row.clamp(max=LOG_RATIO_LIMIT).exp(), some)}
    out["min"] = Peak.over(log_row.exp(), some, largest=False)
    if rows:
        out["ratio_fraction_high"] = SumCount.over(log_row > math.log(spec.upper), some)
        out["ratio_fraction_low"] = SumCount.over(log_row < math.log(spec.floor), some)
    return out


@dataclass(frozen=True)
class ReportedRejection:
    """The statistic of a rejection of 0.9, which has bounds of any sign and an exponent clamped at ±20."""

    rule: Rejection
    lower: float | None
    upper: float

    def values(self, b: PolicyBatch) -> Tensor:
        """[N] or [S] float64."""
        rho = log_ratio_to(b, self.rule.towards).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        moved = replace(b, proximal_log_prob=rho, behavior_log_prob=torch.zeros_like(rho), log_prob=rho)
        return self.rule.values(moved)

    def keep(self, b: PolicyBatch) -> Tensor:
        """[N] bool."""
        values = self.values(b)
        lower = -math.inf if self.lower is None else self.lower
        good = (values <= self.upper) & (values >= lower)
        if self.rule.level != "token":
            good = good[b.sequence_index]
        return b.loss_mask & good

    def numbers(self, b: PolicyBatch) -> Metrics:
        """The metrics that 0.9 reports, under bare names; verl leaves out empty rows here too."""
        each = self.values(b)
        mask = b.loss_mask
        some = segment_count(mask, b.cu_seqlens) > 0
        if self.rule.level == "token":
            token = each
            row = segment_mean(token, mask, b.cu_seqlens)
            where = mask
        else:
            token = each[b.sequence_index]
            row = each
            where = some
        hit = mask & ~self.keep(b)
        lowest = 0.0 if self.lower is None else self.lower
        below = -math.inf if self.lower is None else self.lower
        out: Metrics = {
            "mean": SumCount.over(token, mask),
            "max": Peak.over(each, where),
            "min": Peak.over(each, where, largest=False),
            "fraction_high": SumCount.over(each > self.upper, where),
            "fraction_low": SumCount.over(each < below, where),
            "std": Spread.over(token.clamp(lowest, self.upper), mask),
            "seq_mean": SumCount.over(row, some),
            "seq_std": Spread.over(row, some, "sample_std"),
            "seq_max": Peak.over(row, some),
            "seq_min": Peak.over(row, some, largest=False),
            "seq_max_deviation": Peak.over(row.abs(), some),
            "seq_fraction_high": SumCount.over(row > self.upper, some),
            "masked_fraction": SumCount.over(hit, mask),
            "seq_masked_fraction": SumCount.over(segment_count(hit, b.cu_seqlens) > 0, some),
        }
        if self.lower is None:
            return out
        return out | {"seq_fraction_low": SumCount.over(row < self.lower, some)}


def masked_numbers(b: PolicyBatch, keep: Tensor, *, all_rows: bool) -> Metrics:
    """Shares of tokens and rows that a mask removes, the latter of all rows or of the non-empty ones."""
    hit = b.loss_mask & ~keep
    some = segment_count(b.loss_mask, b.cu_seqlens) > 0
    rows = segment_count(hit, b.cu_seqlens) > 0
    counted = torch.ones_like(some) if all_rows else some
    return {
        "rollout_rs_masked_fraction": SumCount.over(hit, b.loss_mask),
        "rollout_rs_seq_masked_fraction": SumCount.over(rows, counted),
    }


def number_checks(record: Record, ours: Mapping[str, Any]) -> list[Check]:
    """A check for each of the record's metrics in `ours`, regardless of verl's prefix."""
    checks = []
    for leaf, theirs in record.leaves.items():
        if not leaf.startswith("metrics.") or "/" not in leaf:
            continue
        name = leaf.split("/", 1)[1].removeprefix("mismatch_")
        if name in ours:
            checks.append(_check(leaf, ours[name], theirs, single=record.single))
    return checks


def _check(leaf: str, metric: Any, theirs: Any, *, single: bool) -> Check:
    """Shares are float32 in verl. `std` is from E[x²] − E[x]²: in float64 with n + 1e-8 in both means, in float32 with
    rounding."""
    if isinstance(metric, Spread) and metric.kind == "std":
        scale = abs(float(metric.mean)) + metric.value
        rounding = 1e-6 * scale**2  # of the variance in float32
        if single:
            noise = min(math.sqrt(rounding), rounding / max(metric.value, 1e-12))
        else:
            noise = scale * 1e-7
        return Check(leaf, (metric.value, _noisy_std(metric)), theirs, 1e-5, noise)
    loose = (2e-5, 2e-6) if single else (5e-7, 1e-10)
    ours: Any = metric.value
    if isinstance(metric, Spread) and metric.kind == "effective_sample_size" and metric.mean > 0:
        ours = (ours, ours * (1 + EPSILON / float(metric.mean)) ** 2)  # verl divides the weights by their mean + 1e-8
    scale = 1.0 if "chi2" in leaf else 0.0  # χ² is a mean minus 1
    return Check(leaf, ours, theirs, *loose, scale=scale)


def _noisy_std(metric: Spread) -> float:
    count = float(metric.count)
    mean = float(metric.mean)
    if count <= 1:
        return 0.0
    below = count + EPSILON
    second = (float(metric.squares) + count * mean * mean) / below
    return math.sqrt(max(0.0, second - (count * mean / below) ** 2))
