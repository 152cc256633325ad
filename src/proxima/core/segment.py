"""Sums, counts and means of the sequences of a packed axis, without a Python loop over them. Prefix sums and quantiles
are in `sequence_rows`.

Every function takes `cu_seqlens` [S+1]; sequence s is `cu_seqlens[s]:cu_seqlens[s+1]` and may be empty.

Determinism on CUDA, for all of `core`: `segment_reduce` adds each segment in a fixed order, forward and backward.
`index_add` (`group_sum`, `optimal_token_baseline`, the buckets of `mismatch_metrics`) adds in any order unless
`torch.use_deterministic_algorithms(True)` is set. So does a float `cumsum`, which that switch refuses; under it the
prefix sums of `cppo`, `m2po`, `second_moment`, `gae` and the like are matrix products (`sequence_rows.prefix_sums`),
deterministic with `CUBLAS_WORKSPACE_CONFIG=:4096:8`. Counts are integers. On a CPU, everything is deterministic.
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
    """[S], the sum of `values` [N] over each sequence, 0 for an empty one; differentiable. It accumulates in float64,
    returns the dtype of `values`, and depends on no other sequence, not even in its last bit."""
    lengths = cu_seqlens.diff().long()
    if len(lengths) == 0:
        return values.new_zeros(0) + values.sum() * 0
    sums: Tensor = torch.segment_reduce(values.double(), "sum", lengths=lengths, initial=0.0, unsafe=True)
    return sums.to(values.dtype)


def segment_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S], the mean of `values` [N] over the tokens of `mask` in each sequence, 0 if it has none; differentiable."""
    total = segment_sum(torch.where(mask, values, 0.0), cu_seqlens)
    return total / segment_count(mask, cu_seqlens).clamp(min=1)
