"""The protocol of preference losses: pairs in, a loss of each pair out; and the log-probs of completions."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from proxima.core.metrics import Metrics, SumCount
from proxima.core.ratio import either
from proxima.core.segment import segment_count, segment_sum
from proxima.data import require
from proxima.data.field_checks import check_fields
from proxima.data.policy_batch import finite_log_prob


@dataclass(frozen=True, kw_only=True)
class PreferencePairs:
    """S pairs.

    Args:
        chosen, rejected: [S] float, nats, summed log-prob of the completion under the policy, with gradient.
        reference_chosen, reference_rejected: [S] float, nats, the same under the frozen reference; zeros without one.
        chosen_length, rejected_length: [S] int, completion tokens.
    """

    chosen: Annotated[Tensor, "float S"]
    rejected: Annotated[Tensor, "float S"]
    reference_chosen: Annotated[Tensor, "float S"]
    reference_rejected: Annotated[Tensor, "float S"]
    chosen_length: Annotated[Tensor, "int S"]
    rejected_length: Annotated[Tensor, "int S"]

    def __post_init__(self) -> None:
        check_fields(self, gradient=("chosen", "rejected"))


def log_ratio(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """log π − log π_ref; 0 if both are −inf (see `finite_log_prob`)."""
    return finite_log_prob(log_prob) - finite_log_prob(reference_log_prob)


@dataclass(frozen=True)
class Pairwise:
    """Base of the losses of pairs.

    whole_batch: the loss of a pair depends on the other pairs of the update.
    by_length: it divides log-ratios by the completions' lengths itself.

    Args:
        beta: larger values stay closer to the reference, > 0.
    """

    beta: float = 0.1
    whole_batch: ClassVar[bool] = False
    by_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(0 < self.beta < math.inf, "beta", self.beta, "must be > 0 and finite")

    def __call__(self, p: PreferencePairs) -> Tensor:
        """[S] loss of each pair, with gradient."""
        return self.loss(*self.scores(p))

    def denominator(self, chosen_length: Tensor) -> Tensor:
        """[] float64, the divisor of the sum of the losses: the number of pairs. It adds up over the parts of a batch.
        The mean over a part's pairs times the part's denominator is the part's numerator."""
        return chosen_length.new_full((), len(chosen_length), dtype=torch.float64)

    def scores(self, p: PreferencePairs) -> tuple[Tensor, Tensor]:
        return log_ratio(p.chosen, p.reference_chosen), log_ratio(p.rejected, p.reference_rejected)

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        raise NotImplementedError

    def metrics(self, p: PreferencePairs) -> Metrics:
        """Implicit rewards β c and β r, for every loss (T18); a tie counts as wrong."""
        chosen, rejected = Pairwise.scores(self, p)
        c = self.beta * chosen
        r = self.beta * rejected
        every = torch.ones_like(c, dtype=torch.bool)
        return {
            "rewards/chosen": SumCount.over(c, every),
            "rewards/rejected": SumCount.over(r, every),
            "rewards/margins": SumCount.over(c - r, every),
            "rewards/accuracies": SumCount.over(c > r, every),
        }


@dataclass(frozen=True)
class Smoothed(Pairwise):
    """Base of the losses that allow for wrong labels.

    Args:
        label_smoothing: ε, the share of flipped labels, in [0, .5).
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.label_smoothing < 0.5, "label_smoothing", self.label_smoothing, "must be in [0, 0.5)")
        super().__post_init__()


def completion_log_prob(
    log_prob: Tensor, mask: Tensor, cu_seqlens: Tensor, other_length: Tensor | None = None, alpha: float = 1.0
) -> Tensor:
    """[S] log-prob of each completion: the sum over its masked tokens; with gradient.

    Args:
        log_prob: [N] float, nats. mask: [N] bool, completion tokens. cu_seqlens: [S+1] int.
        other_length: [S] int, tokens of the other completion of the pair; tokens beyond the shorter one are weighted by
            `alpha`.
        alpha: in [0, 1]; 1 is DPO, 0 truncates both to the same length. LD-DPO, arXiv 2409.06411; TRL `ld_alpha`.
    """
    require(0 <= alpha <= 1, "alpha", alpha, "must be in [0, 1]")
    chosen = torch.where(mask, log_prob, 0.0)
    if other_length is not None and alpha < 1:
        count = mask.long().cumsum(0)
        starts = torch.cat([count.new_zeros(1), count])[cu_seqlens[:-1].long()]
        shared = torch.minimum(segment_count(mask, cu_seqlens), other_length)
        last = torch.repeat_interleave(starts + shared, cu_seqlens.diff(), output_size=len(mask))
        chosen = chosen * either(count <= last, 1.0, alpha, chosen)
    return segment_sum(chosen, cu_seqlens)


def wpo_weight(log_prob: Tensor, log_sum_square: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] exp(mean over tokens of log π − log Σ_v π_v²), detached: how on-policy a completion is. Multiply the loss by
    the weights of both completions.

    Args: log_prob [N] nats; log_sum_square [N], log Σ_v π_v² at the position; mask [N] bool; cu_seqlens [S+1].
    Source: WPO, arXiv 2406.11827; TRL `use_weighting` (T17: not clamped at 1).
    """
    gap = torch.where(mask, (log_prob - log_sum_square).detach(), 0.0)
    return (segment_sum(gap, cu_seqlens) / segment_count(mask, cu_seqlens).clamp(min=1)).exp()
