"""Aggregation: from per-token losses to a numerator and a denominator that add up over micro-batches and ranks.

The denominator depends only on the loss mask, so it is known for the whole optimizer batch before the first forward
pass; no split into micro-batches, permutation or world size changes loss or gradient. A sequence without a loss token
is in no denominator (as in verl; TRL counts empty rows in `grpo`). Tokens that a surrogate masks stay in it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proxima.core.loss import Aggregate
from proxima.core.segment import segment_count
from proxima.data import require
from proxima.data.policy_batch import PolicyBatch


class _Sum(Aggregate):
    def __call__(self, loss: Tensor, b: PolicyBatch) -> Tensor:
        return torch.where(b.loss_mask, loss, 0.0).sum(dtype=torch.float64)


class _PerSequence(_Sum):
    def denominator(self, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        """S, the number of sequences with a loss token."""
        return (segment_count(loss_mask, cu_seqlens) > 0).sum(dtype=torch.float64)


@dataclass(frozen=True)
class TokenMean(_Sum):
    """Every loss token has the same weight.

        Σ loss / Σ m

    Args:
        loss: [N] float, with gradient; only loss tokens are read. b: the batch.
    Returns: the numerator, [] float64. `denominator(loss_mask [N], cu_seqlens [S+1])`: the number of loss tokens, []
        float64.
    Edge cases: without a loss token, numerator and denominator are 0.
    Source: DAPO, arXiv 2503.14476, Eq. 8. verl `token-mean`, TRL `bnpo` (one micro-batch) and `dapo` (whole batch).
    Differs: verl's denominator is NaN for an all-masked batch (P1); here the loss is 0.
    """

    def denominator(self, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        return loss_mask.sum(dtype=torch.float64)


@dataclass(frozen=True)
class SequenceMeanTokenMean(_PerSequence):
    """Every sequence has the same weight, so the tokens of longer sequences have less weight.

        Σ_s (Σ_t loss / n_s) / S        n_s loss tokens of sequence s, S sequences with n_s > 0

    Args, Returns, Edge cases: as `TokenMean`; the denominator is S.
    Source: GRPO, arXiv 2402.03300, Eq. 3. verl `seq-mean-token-mean`, TRL `grpo`.
    Differs: verl divides by n_s + 1e-8 (P2); TRL counts rows without a loss token in S (T1).
    """

    def __call__(self, loss: Tensor, b: PolicyBatch) -> Tensor:
        share = 1.0 / segment_count(b.loss_mask, b.cu_seqlens).clamp(min=1).double()
        return super().__call__(loss.double() * share[b.sequence_index], b)


@dataclass(frozen=True)
class SequenceMeanTokenSum(_PerSequence):
    """The mean over sequences of their summed token losses: Σ loss / S.

    Args, Returns, Edge cases: as `TokenMean`; the denominator is S, the sequences with a loss token.
    Source: verl `seq-mean-token-sum`; the policy-gradient theorem with one term per trajectory.
    """


@dataclass(frozen=True)
class SequenceMeanTokenSumNorm(_PerSequence):
    """The mean over sequences of their summed token losses divided by a constant length, so that a long completion does
    not shrink the weight of the others.

        Σ loss / horizon / S

    Args:
        horizon: tokens, > 0; constant during a run, usually the completion limit.
    Returns, Edge cases: as `TokenMean`; the numerator is already divided by `horizon`, the denominator is S.
    Source: Dr. GRPO, arXiv 2503.20783. UniRL `horizon` 16384; TRL `dr_grpo` (max_completion_length).
    Differs: unless `loss_scale_factor` is set, verl divides by the padded width, which changes with the batch (P1).
    """

    horizon: float = 16384.0

    def __post_init__(self) -> None:
        require(0 < self.horizon < float("inf"), "horizon", self.horizon, "must be > 0 tokens and finite")

    def __call__(self, loss: Tensor, b: PolicyBatch) -> Tensor:
        return super().__call__(loss, b) / self.horizon


@dataclass(frozen=True)
class TokenSum(_Sum):
    """The undivided sum: Σ loss. The denominator is 0, which means "divide by one".

    Args, Returns: as `TokenMean`. The gradient grows with the batch. Source: verl `token-sum`.
    """

    def denominator(self, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        return loss_mask.new_zeros((), dtype=torch.float64)
