"""The mismatch of rollout engine and trainer, measured in every run, whatever the correction."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from proxima.core.correction.weight_statistics import (
    CATASTROPHIC,
    PERCENTILES,
    LossTokens,
    distribution,
    mean_of,
    peak_of,
    policy_statistics,
    safe_exp,
    sequence_statistics,
)
from proxima.core.metrics import Metrics, QuantileSketch, SumCount, k3
from proxima.data.policy_batch import PolicyBatch

POSITIONS = 4  # equal parts of a completion
PROBABILITIES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)  # edges of the bins of the behavior probability


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
    current, behavior = tokens.log_probs(b.log_prob), tokens.log_probs(b.behavior_log_prob)
    rho = current - behavior
    weight, catastrophic = safe_exp(rho), rho < math.log(CATASTROPHIC)
    total = tokens.sums(rho)
    levels = {
        "rollout_is": weight,
        "rollout_is_sequence": safe_exp(total),
        "rollout_is_geometric": safe_exp(total / tokens.lengths),
    }
    out: Metrics = {f"{level}_{name}": m for level, w in levels.items() for name, m in distribution(w).items()}
    counts = QuantileSketch.histogram(rho)
    out |= {f"rollout_is_{name}": QuantileSketch(counts, q) for name, q in PERCENTILES.items()}
    out |= sequence_statistics(tokens.means(weight)) | policy_statistics(rho, current, tokens)
    probability = behavior.exp()
    gap, distance = rho.abs(), distribution((current.exp() - probability).abs())
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
    place = torch.arange(len(b), device=b.cu_seqlens.device) - b.cu_seqlens[:-1].long()[b.sequence_index]
    bucket = (place * POSITIONS).div(b.lengths[b.sequence_index].long(), rounding_mode="floor")[tokens.index]
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
    return {
        f"{name}/{column}": SumCount(sums[column][i], counts[i]) for i, name in enumerate(names) for column in columns
    }
