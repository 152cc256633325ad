"""Aggregation: from per-token losses to a numerator and a denominator that add over micro-batches and ranks.

The denominator is a function of the loss mask alone, so the trainer knows that of the whole optimizer batch before the
first forward. A split into micro-batches, a permutation or another world size then changes neither loss nor gradient. A
sequence with no loss token counts in no denominator (verl: the same; TRL counts empty rows in `grpo`). Tokens that a
surrogate masks out stay in the denominator.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proxima.core.loss import Aggregate
from proxima.core.segment import segment_count
from proxima.data import PolicyBatch, require


def _total(loss: Tensor, b: PolicyBatch) -> Tensor:
    return torch.where(b.loss_mask, loss, torch.zeros((), dtype=loss.dtype, device=loss.device)).sum(
        dtype=torch.float64
    )


def _sequences(loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return (segment_count(loss_mask, cu_seqlens) > 0).sum(dtype=torch.float64)


@dataclass(frozen=True)
class TokenMean(Aggregate):
    """Every loss token weighs the same.

        Σ loss / Σ m

    Args:
        loss: [N] float, with gradient; only loss tokens are looked at.
        b: the batch.
    Returns: the numerator, [] float64; `denominator(loss_mask [N], cu_seqlens [S+1])` is the number of loss tokens, []
        float64.
    Edge cases: nothing in the loss: numerator and denominator 0.
    Source: DAPO, arXiv 2503.14476, Eq. 8. verl `token-mean`, TRL `bnpo` (one micro-batch) and `dapo` (whole batch).
    Differs: verl's denominator is NaN for an all-masked batch (P1); here the loss is 0.
    """

    def __call__(self, loss: Tensor, b: PolicyBatch) -> Tensor:
        return _total(loss, b)

    def denominator(self, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        return loss_mask.sum(dtype=torch.float64)


@dataclass(frozen=True)
class SequenceMeanTokenMean(Aggregate):
    """Every sequence weighs the same; a token weighs less the longer its sequence.

        Σ_s (Σ_t loss / n_s) / S        n_s loss tokens of sequence s, S sequences with n_s > 0

    Args, Returns, Edge cases: as `TokenMean`; the denominator is S.
    Source: GRPO, arXiv 2402.03300, Eq. 3. verl `seq-mean-token-mean`, TRL `grpo`.
    Differs: verl divides by n_s + 1e-8 (P2); TRL counts rows without a loss token in S (T1).
    """

    def __call__(self, loss: Tensor, b: PolicyBatch) -> Tensor:
        share = 1.0 / segment_count(b.loss_mask, b.cu_seqlens).clamp(min=1).double()
        return _total(loss.double() * share[b.sequence_index], b)

    def denominator(self, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        return _sequences(loss_mask, cu_seqlens)


@dataclass(frozen=True)
class SequenceMeanTokenSum(Aggregate):
    """The mean over sequences of their summed token losses: Σ loss / S.

    Args, Returns, Edge cases: as `TokenMean`; the denominator is S, the sequences with a loss token.
    Source: verl `seq-mean-token-sum`; the policy-gradient theorem with one term a trajectory.
    """

    def __call__(self, loss: Tensor, b: PolicyBatch) -> Tensor:
        return _total(loss, b)

    def denominator(self, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        return _sequences(loss_mask, cu_seqlens)


@dataclass(frozen=True)
class SequenceMeanTokenSumNorm(Aggregate):
    """The mean over sequences of their summed token losses, over a constant length: a longer completion does not make
    the rest smaller.

        Σ loss / horizon / S

    Args:
        horizon: tokens, > 0: a constant of the run, usually the longest completion allowed.
    Returns, Edge cases: as `TokenMean`; the numerator is already divided by `horizon`, the denominator is S.
    Source: Dr. GRPO, arXiv 2503.20783. UniRL `horizon` 16384; TRL `dr_grpo` (max_completion_length).
    Differs: verl divides by the padded width of the batch at hand unless `loss_scale_factor` is set (P1): it changes
        with the batch.
    """

    horizon: float = 16384.0

    def __post_init__(self) -> None:
        require(0 < self.horizon < float("inf"), "horizon", self.horizon, "must be > 0 tokens and finite")

    def __call__(self, loss: Tensor, b: PolicyBatch) -> Tensor:
        return _total(loss, b) / self.horizon

    def denominator(self, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        return _sequences(loss_mask, cu_seqlens)


@dataclass(frozen=True)
class TokenSum(Aggregate):
    """The plain sum; nothing divides it: Σ loss, with denominator 0, which says "divide by one".

    Args, Returns: as `TokenMean`. The size of the gradient grows with the batch. Source: verl `token-sum`.
    """

    def __call__(self, loss: Tensor, b: PolicyBatch) -> Tensor:
        return _total(loss, b)

    def denominator(self, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        return loss_mask.new_zeros((), dtype=torch.float64)


AGGREGATES: dict[str, type] = {
    "sequence_mean_token_mean": SequenceMeanTokenMean,
    "sequence_mean_token_sum": SequenceMeanTokenSum,
    "sequence_mean_token_sum_norm": SequenceMeanTokenSumNorm,
    "token_mean": TokenMean,
    "token_sum": TokenSum,
}

AGGREGATE_ALIASES: dict[str, str] = {  # what the peers call them → a key of AGGREGATES
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "sequence_mean_token_sum_norm",
    "grpo": "sequence_mean_token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
    "token-mean": "token_mean",
    "token-sum": "token_sum",
}
