"""The log-prob of a completion, and how on-policy it is."""

import torch
from torch import Tensor

from proxima.core.ratio import either
from proxima.core.segment import segment_count, segment_sum
from proxima.data import require


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
