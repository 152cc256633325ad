"""Statistics of importance weights and of the two policies behind them, and `mismatch_metrics`, those of rollout engine
and trainer, measured in every run, whatever the correction. All merge over micro-batches and ranks.

Weights are unbounded (but for exp's safety clamp at ±20) unless the name ends in `_bounded` or `_applied`: an effective
sample size computed after truncation says little. Averages over sequences leave out those without a loss token; verl
counts them as ratio 1 (P27, P35).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from proxima.core.metrics import Metrics, Peak, QuantileSketch, Spread, SpreadKind, SumCount, k3
from proxima.core.ratio import LOG_RATIO_LIMIT
from proxima.core.segment import segment_count
from proxima.data.policy_batch import PolicyBatch, finite_log_prob

POSITIONS = 4  # equal parts of a completion
PROBABILITIES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)  # edges of the bins of the behavior probability
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
        lengths: Sequence[int] | None = b.counts.in_loss
        if lengths is None:
            lengths = counts.tolist()
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


@torch.no_grad()
def mismatch_metrics(b: PolicyBatch) -> Metrics:
    """Measure the current policy π against the behavior policy μ, which sampled.

        rho_t = log pi - log mu    weights: token exp(rho_t), sequence exp(sum rho), geometric exp(mean rho)

    Args:
        b: `log_prob`, `behavior_log_prob` [N], nats, at the sampling temperature; `loss_mask` [N] bool. No other
            log-prob is read, so neither corrections nor the proximal policy have an effect.
    Returns: over the loss tokens, under `mismatch/`:
        `rollout_is_{mean,std,min,max,eff_sample_size}` and `_p25` … `_p99` (to 1 % of rho) of the token weights;
        `rollout_is_seq_{mean,std,min,max,max_deviation}` of each sequence's mean token weight;
        `rollout_is_{sequence,geometric}_{mean,std,min,max,eff_sample_size}` of the sequences' weights;
        `rollout_is_catastrophic_{token,seq}_fraction`: tokens with a weight below 1e-4, sequences that have one;
        `kl`, `k3_kl`, `chi2_{token,seq}` and the perplexities of `policy_statistics`;
        `log_prob_absdiff_{mean,max}` |rho|, nats, and `prob_absdiff_{mean,std,max}` |pi - mu|;
        `position_<i>_of_4/{k3_kl,log_prob_absdiff}` by relative position in the completion;
        `probability_<low>_<high>/{k3_kl,log_prob_absdiff,token_fraction}` by low <= mu < high.
    Raises: ValueError: the batch lacks `behavior_log_prob`.
    Edge cases: weights are clamped at exp(+-20). A batch without loss tokens gives every key, without values. After an
        update on the same data, rho also includes the effect of the update: measure at the first forward pass.
    Source: verl's rollout correction metrics; UniRL's `rollout_replay_logp_absdiff_mean` is `log_prob_absdiff_mean`.
    Differs: verl reports bounded weights (P28, P29).
    """
    if b.behavior_log_prob is None:
        raise ValueError("mismatch_metrics needs `behavior_log_prob`, which the batch lacks: the engine supplies it.")
    tokens = LossTokens.of(b)
    current = tokens.log_probs(b.log_prob)
    behavior = tokens.log_probs(b.behavior_log_prob)
    rho = current - behavior
    weight = safe_exp(rho)
    catastrophic = rho < math.log(CATASTROPHIC)
    total = tokens.sums(rho)
    levels = {
        "rollout_is": weight,
        "rollout_is_sequence": safe_exp(total),
        "rollout_is_geometric": safe_exp(total / tokens.lengths),
    }
    out: Metrics = {}
    for level, weights in levels.items():
        out |= {f"{level}_{name}": metric for name, metric in distribution(weights).items()}
    counts = QuantileSketch.histogram(rho)
    out |= {f"rollout_is_{name}": QuantileSketch(counts, q) for name, q in PERCENTILES.items()}
    out |= sequence_statistics(tokens.means(weight)) | policy_statistics(rho, current, tokens)
    probability = behavior.exp()
    gap = rho.abs()
    distance = distribution((current.exp() - probability).abs())
    out |= {
        "rollout_is_catastrophic_seq_fraction": mean_of(tokens.sums(catastrophic.double()) > 0),
        "log_prob_absdiff_mean": mean_of(gap),
        "log_prob_absdiff_max": peak_of(gap),
        **{f"prob_absdiff_{name}": distance[name] for name in ("mean", "std", "max")},
    }
    columns = {"k3_kl": k3(rho), "log_prob_absdiff": gap}
    out |= _by_position(b, tokens, columns) | _by_probability(probability, columns)
    return {f"mismatch/{name}": metric for name, metric in out.items()}


def _by_position(b: PolicyBatch, tokens: LossTokens, columns: dict[str, Tensor]) -> dict[str, SumCount]:
    start = b.cu_seqlens[:-1].long()[b.sequence_index]
    length = b.lengths[b.sequence_index].long()
    place = torch.arange(len(b), device=b.cu_seqlens.device) - start
    bucket = (place * POSITIONS).div(length, rounding_mode="floor")[tokens.index]
    names = [f"position_{i}_of_{POSITIONS}" for i in range(1, POSITIONS + 1)]
    return _bucket_means(bucket, names, columns)


def _by_probability(probability: Tensor, columns: dict[str, Tensor]) -> dict[str, SumCount]:
    bucket = torch.stack([probability >= edge for edge in PROBABILITIES[1:-1]]).sum(0)
    names = [f"probability_{low:g}_{high:g}" for low, high in pairwise(PROBABILITIES)]
    out = _bucket_means(bucket, names, columns)
    every = probability.new_full((), len(probability))
    return out | {f"{name}/token_fraction": SumCount(out[f"{name}/k3_kl"].count, every) for name in names}


def _bucket_means(bucket: Tensor, names: list[str], columns: dict[str, Tensor]) -> dict[str, SumCount]:
    """The mean of each column over the tokens of each bucket; `bucket` [n] int64 indexes `names`."""
    empty = torch.zeros(len(names), dtype=torch.float64, device=bucket.device)
    counts = empty.index_add(0, bucket, torch.ones(len(bucket), dtype=torch.float64, device=bucket.device))
    sums = {column: empty.index_add(0, bucket, values) for column, values in columns.items()}
    means: dict[str, SumCount] = {}
    for i, name in enumerate(names):
        means |= {f"{name}/{column}": SumCount(sums[column][i], counts[i]) for column in columns}
    return means


def mean_of(values: Tensor) -> SumCount:
    """The mean of all of `values`; of a bool tensor the share that is True."""
    return SumCount(values.sum(dtype=torch.float64), values.new_full((), len(values), dtype=torch.float64))


def peak_of(values: Tensor, *, largest: bool = True) -> Peak:
    """The largest, or smallest, of all of `values`, which may be empty."""
    if not len(values):
        empty = -math.inf if largest else math.inf
        return Peak(values.new_full((), empty), largest)
    extreme = values.amax() if largest else values.amin()
    return Peak(extreme, largest)


def distribution(values: Tensor, *, sample: bool = False) -> dict[str, SumCount | Spread | Peak]:
    """Mean, std (with `sample`, ddof = 1), min, max and effective sample size, 1 / mean((w / mean w)²)."""
    mean = mean_of(values)
    centre = mean.sum / mean.count.clamp(min=1)
    squares = (values - centre).square().sum()
    kind: SpreadKind = "sample_std" if sample else "std"
    return {
        "mean": mean,
        "std": Spread(mean.count, centre, squares, kind),
        "min": peak_of(values, largest=False),
        "max": peak_of(values),
        "eff_sample_size": Spread(mean.count, centre, squares, "effective_sample_size"),
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
    training = -tokens.means(target)
    gap = -total / tokens.lengths
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
