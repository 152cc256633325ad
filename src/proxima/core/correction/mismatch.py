"""Statistics of how far behavior and proximal policy disagree. All merge exactly over micro-batches and ranks.

Weights here are unbounded (but for exp's safety clamp at ±20) unless the name ends in `_bounded`: an effective sample
size of weights that were truncated first says little. Averages over sequences leave out those without a loss token;
verl counts them as ratio 1 (P27, P35).
"""

from typing import Literal

import torch
from torch import Tensor

from proxima.core.metrics import Metrics, Peak, Quantile, Spread, SumCount, k3
from proxima.core.ratio import LOG_RATIO_LIMIT
from proxima.core.segment import segment_count, segment_mean, segment_sum
from proxima.data import PolicyBatch

WeightLevel = Literal["token", "sequence", "geometric"]
PERCENTILES = {"p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
CATASTROPHIC = 1e-4  # a ratio below this is a token that the other policy would hardly ever sample


def log_weight(rho: Tensor, b: PolicyBatch, level: WeightLevel) -> Tensor:
    """[N] the log-weight of each loss token at its level, from ρ [N] (0 outside the loss); the same within a sequence
    but at token level."""
    if level == "token":
        return rho
    reduce = segment_sum(rho, b.cu_seqlens) if level == "sequence" else segment_mean(rho, b.loss_mask, b.cu_seqlens)
    return torch.where(b.loss_mask, reduce[b.sequence_index], torch.zeros_like(rho))


def weight_statistics(log_w: Tensor, b: PolicyBatch, level: WeightLevel, upper: float, lower: float) -> Metrics:
    """Distribution of the weights, from their logs [N], against the bounds that the correction has."""
    mask, edges = b.loss_mask, b.cu_seqlens
    raw = log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    bounded = raw.clamp(lower, upper)
    some = segment_count(mask, edges) > 0
    row = segment_mean(raw, mask, edges)
    own, own_mask = (row, some) if level == "sequence" else (raw, mask)  # a whole sequence's weight counts once
    metrics: Metrics = {
        "rollout_is_mean": SumCount.over(raw, mask),
        "rollout_is_std": Spread.over(raw, mask),
        "rollout_is_std_bounded": Spread.over(bounded, mask),
        "rollout_is_eff_sample_size": Spread.over(raw, mask, "effective_sample_size"),
        "rollout_is_eff_sample_size_bounded": Spread.over(bounded, mask, "effective_sample_size"),
        "rollout_is_max": Peak.over(raw, mask),
        "rollout_is_min": Peak.over(raw, mask, largest=False),
        "rollout_is_ratio_fraction_high": SumCount.over(own > upper, own_mask),
        "rollout_is_ratio_fraction_low": SumCount.over(own < lower, own_mask),
        "rollout_is_seq_mean": SumCount.over(row, some),
        "rollout_is_seq_std": Spread.over(row, some, "sample_std"),
        "rollout_is_seq_max": Peak.over(row, some),
        "rollout_is_seq_min": Peak.over(row, some, largest=False),
        "rollout_is_seq_max_deviation": Peak.over((row - 1).abs(), some),
        "rollout_is_seq_fraction_high": SumCount.over(row > upper, some),
        "rollout_is_seq_fraction_low": SumCount.over(row < lower, some),
    }
    values = raw[mask].double()
    return metrics | {f"rollout_is_{name}": Quantile(values, q) for name, q in PERCENTILES.items()}


def applied_statistics(weight: Tensor, log_w: Tensor, b: PolicyBatch, lower: float) -> Metrics:
    """Of the weights that are really applied, [N], before normalisation; and how many a bound has moved."""
    mask, edges = b.loss_mask, b.cu_seqlens
    some = segment_count(mask, edges) > 0
    row = segment_mean(weight, mask, edges)
    moved = mask & (weight != log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp())
    return {
        "rollout_is_mean_applied": SumCount.over(weight, mask),
        "rollout_is_std_applied": Spread.over(weight, mask),
        "rollout_is_max_applied": Peak.over(weight, mask),
        "rollout_is_min_applied": Peak.over(weight, mask, largest=False),
        "rollout_is_eff_sample_size_applied": Spread.over(weight, mask, "effective_sample_size"),
        "rollout_is_seq_mean_applied": SumCount.over(row, some),
        "rollout_is_seq_std_applied": Spread.over(row, some, "sample_std"),
        "rollout_is_seq_max_applied": Peak.over(row, some),
        "rollout_is_seq_min_applied": Peak.over(row, some, largest=False),
        "rollout_is_seq_max_deviation_applied": Peak.over((row - 1).abs(), some),
        "rollout_is_clipped_fraction": SumCount.over(moved, mask),
        "rollout_is_seq_clipped_fraction": SumCount.over(segment_count(moved, edges) > 0, some),
    }


def policy_statistics(rho: Tensor, b: PolicyBatch, target: Tensor) -> Metrics:
    """Divergence and perplexity of the two policies, from ρ and the target policy's log-probs [N], both 0 outside the
    loss.

    `kl` is k1 and `k3_kl` k3 of KL(μ‖π_prox), per token; χ² is mean(w²) − 1, per token and per sequence (its exponents
    clamped at ±20, P30). Perplexities are of sequences, exp(−mean log-prob), averaged over sequences; `log_ppl_diff` is
    training minus rollout.
    """
    mask, edges = b.loss_mask, b.cu_seqlens
    some = segment_count(mask, edges) > 0
    training = -segment_mean(target, mask, edges)
    gap = -segment_mean(rho, mask, edges)
    rollout = training - gap
    square = 2 * rho.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    whole = 2 * segment_sum(rho, edges).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "kl": SumCount.over(-rho, mask),
        "k3_kl": SumCount.over(k3(rho), mask),
        "chi2_token": SumCount.over(torch.expm1(square), mask),
        "chi2_seq": SumCount.over(torch.expm1(whole), some),
        "training_ppl": SumCount.over(training.exp(), some),
        "training_log_ppl": SumCount.over(training, some),
        "rollout_ppl": SumCount.over(rollout.exp(), some),
        "rollout_log_ppl": SumCount.over(rollout, some),
        "ppl_ratio": SumCount.over(gap.exp(), some),
        "log_ppl_diff": SumCount.over(gap, some),
        "log_ppl_diff_abs": SumCount.over(gap.abs(), some),
        "log_ppl_diff_max": Peak.over(gap, some),
        "log_ppl_diff_min": Peak.over(gap, some, largest=False),
        "rollout_is_catastrophic_token_fraction": SumCount.over(rho.exp() < CATASTROPHIC, mask),
    }
