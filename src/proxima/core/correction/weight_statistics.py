"""Statistics of importance weights and of the two policies behind them. All merge over micro-batches and ranks.

Weights are unbounded (but for exp's safety clamp at ±20) unless the name ends in `_bounded` or `_applied`: an effective
sample size computed after truncation says little. Averages over sequences leave out those without a loss token; verl
counts them as ratio 1 (P27, P35).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proxima.core.metrics import Metrics, Peak, Spread, SumCount, k3
from proxima.core.ratio import LOG_RATIO_LIMIT
from proxima.core.segment import segment_count
from proxima.data.policy_batch import PolicyBatch, finite_log_prob

PERCENTILES = {"p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
CATASTROPHIC = 1e-4  # a ratio below this is a token that the other policy would hardly ever sample


def safe_exp(log_w: Tensor) -> Tensor:
    """exp with its exponent clamped at ±20."""
    return log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True)
class LossTokens:
    """The n loss tokens of a batch, and the m sequences that have one. There is no device sync if the host knows their
    numbers (`HostCounts.in_loss`).

    Args:
        index: [n] int64, the loss tokens.
        sequences: [m] int64, the sequences that have a loss token.
        lengths: [m] int64, the number of loss tokens of each.
    """

    index: Tensor
    sequences: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, b: PolicyBatch) -> "LossTokens":
        counts = segment_count(b.loss_mask, b.cu_seqlens)
        lengths: Sequence[int] = counts.tolist() if b.counts.in_loss is None else b.counts.in_loss
        index = torch.nonzero_static(b.loss_mask, size=sum(lengths)).flatten()
        sequences = torch.nonzero_static(counts, size=sum(count > 0 for count in lengths)).flatten()
        return cls(index, sequences, counts[sequences])

    def select(self, values: Tensor) -> Tensor:
        """[N] → [n] float64, detached; values outside the loss may be NaN."""
        return values.detach()[self.index].double()

    def log_probs(self, values: Tensor) -> Tensor:
        """[N] → [n] log-probs as by `finite_log_prob`."""
        return finite_log_prob(self.select(values))

    def sums(self, values: Tensor) -> Tensor:
        """[n] → [m] sums over each sequence."""
        if not len(self.lengths):
            return values.new_zeros(0)
        return torch.segment_reduce(values, "sum", lengths=self.lengths, initial=0.0, unsafe=True)

    def means(self, values: Tensor) -> Tensor:
        """[n] → [m] means over each sequence."""
        return self.sums(values) / self.lengths


def mean_of(values: Tensor) -> SumCount:
    """The mean of all of `values`; of a bool tensor the share that is True."""
    return SumCount(values.sum(dtype=torch.float64), values.new_full((), len(values), dtype=torch.float64))


def peak_of(values: Tensor, *, largest: bool = True) -> Peak:
    """The largest, or smallest, of all of `values`, which may be empty."""
    if not len(values):
        return Peak(values.new_full((), -math.inf if largest else math.inf), largest)
    return Peak(values.amax() if largest else values.amin(), largest)


def distribution(values: Tensor, *, sample: bool = False) -> dict[str, SumCount | Spread | Peak]:
    """Mean, std (with `sample`, ddof = 1), min, max and effective sample size, 1 / mean((w / mean w)²)."""
    mean = mean_of(values)
    centre = mean.sum / mean.count.clamp(min=1)
    moments = mean.count, centre, (values - centre).square().sum()
    return {
        "mean": mean,
        "std": Spread(*moments, "sample_std" if sample else "std"),
        "min": peak_of(values, largest=False),
        "max": peak_of(values),
        "eff_sample_size": Spread(*moments, "effective_sample_size"),
    }


def sequence_statistics(row: Tensor) -> Metrics:
    """Statistics of each sequence's mean token weight, [m], under verl's names."""
    statistics = distribution(row, sample=True)
    out: Metrics = {f"rollout_is_seq_{name}": statistics[name] for name in ("mean", "std", "min", "max")}
    return out | {"rollout_is_seq_max_deviation": peak_of((row - 1).abs())}


def policy_statistics(rho: Tensor, target: Tensor, tokens: LossTokens) -> Metrics:
    """Divergence and perplexity of the two policies, from ρ and the target policy's log-probs, both [n], over the loss
    tokens.

    `kl` is k1 and `k3_kl` k3 of KL(μ‖π), nats per token; χ² is mean(w²) − 1, per token and per sequence (its exponents
    clamped at ±20, P30). Perplexities are of sequences, exp(−mean log-prob), averaged over sequences; `log_ppl_diff` is
    training minus rollout.
    """
    total = tokens.sums(rho)
    training, gap = -tokens.means(target), -total / tokens.lengths
    rollout = training - gap
    return {
        "kl": mean_of(-rho),
        "k3_kl": mean_of(k3(rho)),
        "chi2_token": mean_of(torch.expm1(2 * rho.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))),
        "chi2_seq": mean_of(torch.expm1(2 * total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))),
        "training_ppl": mean_of(training.exp()),
        "training_log_ppl": mean_of(training),
        "rollout_ppl": mean_of(rollout.exp()),
        "rollout_log_ppl": mean_of(rollout),
        "ppl_ratio": mean_of(gap.exp()),
        "log_ppl_diff": mean_of(gap),
        "log_ppl_diff_abs": mean_of(gap.abs()),
        "log_ppl_diff_max": peak_of(gap),
        "log_ppl_diff_min": peak_of(gap, largest=False),
        "rollout_is_catastrophic_token_fraction": mean_of(rho < math.log(CATASTROPHIC)),
    }
