"""Sums, counts, prefix sums and quantiles of the sequences of a packed axis, without a Python loop over sequences.

Every function takes `cu_seqlens` [S+1] and treats sequence s as `cu_seqlens[s]:cu_seqlens[s+1]`; sequences may be empty.
"""

import torch
from torch import Tensor


def segment_index(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[N] int64, the sequence of each token."""
    lengths = cu_seqlens.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths, output_size=tokens)


def segment_count(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] int64, the True values of `mask` [N] bool in each sequence; exact."""
    before = torch.zeros(len(mask) + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(mask, 0, out=before[1:])
    return before[cu_seqlens.long()].diff()


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S], the sum of `values` [N] over each sequence, 0 for an empty one; differentiable.

    Accumulates in float64 and returns the dtype of `values`. A sequence's sum depends on no other sequence, not even in its last bit.
    """
    lengths = cu_seqlens.diff().long()
    if len(lengths) == 0:
        return values.new_zeros(0) + values.sum() * 0
    sums: Tensor = torch.segment_reduce(values.double(), "sum", lengths=lengths, initial=0.0, unsafe=True)
    return sums.to(values.dtype)


def segment_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S], the mean of `values` [N] over the True tokens of `mask` in each sequence, 0 where there is none; differentiable."""
    total = segment_sum(torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device)), cu_seqlens)
    return total / segment_count(mask, cu_seqlens).clamp(min=1)


def exclusive_cumsum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] float64: for each token the sum of the values before it in its own sequence; 0 for the first. Not differentiable.

    One float64 prefix sum over the whole axis, minus its value at the start of the sequence. The cancellation costs about 1e-16 of the
    total over the axis, so a million tokens of size 1 keep ten digits; in float32 they would keep one.
    """
    values = values.detach()
    running = torch.zeros(len(values) + 1, dtype=torch.float64, device=values.device)
    torch.cumsum(values.double(), 0, out=running[1:])
    lengths = cu_seqlens.diff()
    return running[:-1].sub_(torch.repeat_interleave(running[cu_seqlens[:-1].long()], lengths, output_size=len(values)))


def segment_quantile(values: Tensor, mask: Tensor, cu_seqlens: Tensor, q: float) -> Tensor:
    """[S] the q-quantile of the masked values of each sequence, linearly interpolated at position q (n − 1); NaN where there is none.

    Args:
        values: [N] float; only the masked ones are looked at, and those must not be NaN.
        mask: [N] bool.
        q: in [0, 1].
    """
    index = segment_index(cu_seqlens, len(values))[mask]
    chosen = values.detach()[mask]
    order = chosen.argsort()
    order = order[index[order].argsort(stable=True)]  # by value, then stably by sequence: sorted within each sequence
    ranked = torch.cat([chosen[order], chosen.new_full((1,), torch.nan)])
    count = segment_count(mask, cu_seqlens)
    start = torch.cat([count.new_zeros(1), count.cumsum(0)])[:-1]
    position = q * (count - 1).clamp(min=0).double()
    low = position.floor().long()
    high = torch.minimum(low + 1, (count - 1).clamp(min=0))
    nothing = torch.full_like(count, len(chosen))
    at_low = ranked[torch.where(count > 0, start + low, nothing)]
    at_high = ranked[torch.where(count > 0, start + high, nothing)]
    return torch.lerp(at_low.double(), at_high.double(), position - low).to(values.dtype)


def clamped_quantile(values: Tensor, mask: Tensor, cu_seqlens: Tensor, q: float, low: float, high: float) -> Tensor:
    """[S] `segment_quantile` clamped to [low, high]; `low` for a sequence without masked tokens.

    Most sequences need no sort: counting the values at most `low`, and those at least `high`, already decides them. Only the sequences
    that counting leaves open are sorted.
    """
    values = values.detach()
    count = segment_count(mask, cu_seqlens)
    position = (q * (count - 1).clamp(min=0).double()).floor().long()
    small = segment_count(mask & (values <= low), cu_seqlens)
    large = segment_count(mask & (values >= high), cu_seqlens)
    is_low = (small >= torch.minimum(position + 2, count)) | (count == 0)
    is_high = ~is_low & (count - large <= position)
    out = torch.where(is_high, torch.full((), high, dtype=values.dtype, device=values.device), low)
    open_ = ~(is_low | is_high)
    if bool(open_.any()):
        lengths = cu_seqlens.diff()
        tokens = torch.repeat_interleave(open_, lengths, output_size=len(values))
        kept = lengths[open_]
        cut = torch.cat([kept.new_zeros(1), kept.cumsum(0)])
        out[open_] = segment_quantile(values[tokens], mask[tokens], cut, q).clamp(low, high)
    return out
