"""Sums and quantiles of padded rows [s, T], and blocks of a few hundred sequences as such rows.

A block holds about `tokens_in_block` tokens: it fits the CPU's cache and bounds the memory. If all sequences have the
same length, a block is a view; otherwise they are sorted by length, which keeps the padding small.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

COLUMNS = 64  # of a row that one matrix product sums up
CPU_BLOCK = 1 << 17  # 512 KiB of float32
GPU_BLOCK = 1 << 24  # a launch costs more than memory there


@dataclass(frozen=True)
class PaddedBlock:
    """Some sequences as padded rows.

    Args:
        index: [s · T] int64, position of each element on the packed axis, N (one past the end) for padding; None if the
            rows are `packed[start:stop]`.
        start, stop: bounds on the packed axis if `index` is None.
        count: [s] int64, tokens of each row. width: T, the largest.
    """

    index: Tensor | None
    start: int
    stop: int
    count: Tensor
    width: int

    def rows(self, packed: Tensor) -> Tensor:
        """[N] → [s, T]; padding holds arbitrary values of the packed axis."""
        if self.index is None:
            return packed[self.start : self.stop].view(-1, self.width)
        return packed.index_select(0, self.index.clamp(max=max(len(packed) - 1, 0))).view(-1, self.width)

    def write(self, out: Tensor, rows: Tensor) -> None:
        """[s, T] → its positions in `out` [N + 1]; padding goes past the end."""
        if self.index is None:
            out[self.start : self.stop].view(-1, self.width).copy_(rows)
        else:
            out.scatter_(0, self.index, rows.reshape(-1))

    @property
    def inside(self) -> Tensor | None:
        """[s, T] bool, False at padding; None without padding."""
        if self.index is None:
            return None
        return torch.arange(self.width, device=self.count.device) < self.count[:, None]


def blocks(
    cu_seqlens: Tensor, lengths_on_host: Sequence[int], tokens_in_block: int | None = None
) -> Iterator[PaddedBlock]:
    """The non-empty sequences in blocks; `lengths_on_host` are the differences of `cu_seqlens`, so that no block waits
    for the device."""
    limit = tokens_in_block or (CPU_BLOCK if cu_seqlens.device.type == "cpu" else GPU_BLOCK)
    cut = cu_seqlens.long()
    lengths = cut.diff()
    if len(lengths) == 0:
        return
    longest = max(lengths_on_host)
    if min(lengths_on_host) == longest > 0:
        per_block = max(1, limit // longest)
        for first in range(0, len(lengths), per_block):
            count = lengths[first : first + per_block]
            yield PaddedBlock(None, first * longest, (first + len(count)) * longest, count, longest)
        return
    order = lengths.argsort(descending=True)
    sizes = sorted(lengths_on_host, reverse=True)
    first, nonempty = 0, sum(size > 0 for size in sizes)
    while first < nonempty:
        width = sizes[first]
        chosen = order[first : min(first + max(1, limit // width), nonempty)]
        column = torch.arange(width, device=cut.device)
        position = cut[chosen][:, None] + column
        index = torch.where(column < lengths[chosen][:, None], position, sum(sizes))
        yield PaddedBlock(index.view(-1), 0, 0, lengths[chosen], width)
        first += len(chosen)


def map_padded(
    function: Callable[..., Tensor],
    cu_seqlens: Tensor,
    lengths_on_host: Sequence[int],
    *packed: Tensor,
    dtype: torch.dtype,
    tokens_in_block: int | None = None,
) -> Tensor:
    """[N] of `dtype`: `function(block, *rows)` of every block, where `rows` are [s, T], one per packed tensor [N], and
    the result is [s, T]."""
    out = torch.empty(len(packed[0]) + 1, dtype=dtype, device=packed[0].device)
    for block in blocks(cu_seqlens, lengths_on_host, tokens_in_block):
        block.write(out, function(block, *(block.rows(values) for values in packed)))
    return out[:-1]


def prefix_sums(rows: Tensor) -> Tensor:
    """[s, T] the sum of each row up to and including each column. See `suffix_sums` for CUDA."""
    return suffix_sums(rows.flip(1)).flip(1) if _refuses_cumsum(rows) else rows.cumsum(1)


def suffix_sums(rows: Tensor, factor: float = 1.0) -> Tensor:
    """[s, T] y_t = x_t + factor y_{t+1}, from the last column of each row to the first.

    The sums within `COLUMNS` columns are one product with the powers of `factor`; the first of each are then summed in
    the same way. Nothing is divided by a power, which may have underflowed: any factor in [0, 1] is as exact as a loop.
    If `factor` is 1, it is a cumsum, except on CUDA under `torch.use_deterministic_algorithms`, which refuses it.
    """
    count, size = len(rows), min(COLUMNS, rows.shape[1])
    if factor == 1 and not _refuses_cumsum(rows):
        return rows.flip(1).cumsum(1).flip(1)
    if size < 2:
        return rows
    power, within = _powers(factor, size, rows.dtype, rows.device)
    sums = pad(rows, (0, -rows.shape[1] % size)).view(count, -1, size) @ within.T
    if sums.shape[1] > 1:
        after = suffix_sums(sums[:, :, 0], factor**size)
        sums[:, :-1] += after[:, 1:, None] * power
    return sums.view(count, -1)[:, : rows.shape[1]]


@lru_cache(maxsize=8)
def _powers(factor: float, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """factor^(size − i) [size], and factor^(j − i) [size, size] for j >= i, 0 below."""
    column = torch.arange(size, dtype=dtype, device=device)
    return factor ** (size - column), (factor ** (column - column[:, None]).clamp(min=0)).triu()


def _refuses_cumsum(rows: Tensor) -> bool:
    return rows.is_cuda and torch.are_deterministic_algorithms_enabled()


def clamped_quantile(values: Tensor, block: PaddedBlock, q: float, low: float, high: float) -> Tensor:
    """[s] the q-quantile of each row, linearly interpolated at position q (n − 1), clamped to [low, high].

    On a CPU, counting the values at most `low` and at least `high` decides most rows; only in the others two order
    statistics are selected, and nothing is sorted. On a GPU, rows are sorted, because selecting rows would wait for the
    device.

    Args:
        values: [s, T] float, >= 0; 0 at padding.
        block: the block they belong to. q: in (0, 1). low, high: 0 <= low <= high.
    """
    count, width = block.count, block.width
    position = q * (count - 1).double()
    rank = position.floor().long()
    if values.device.type != "cpu":
        return sorted_quantile(values, block, rank, position).clamp(low, high).to(values.dtype)
    small = (values <= low).sum(1) - (width - count)  # padding is 0, so it was counted
    large = (values >= high).sum(1)
    is_low = small >= torch.minimum(rank + 2, count)
    is_high = ~is_low & (count - large <= rank)
    out = torch.where(is_high, torch.full((), high, dtype=values.dtype, device=values.device), low)
    open_ = ~(is_low | is_high)
    if bool(open_.any()):
        quantile = _interpolated(values[open_], count[open_], rank[open_], position[open_])
        out[open_] = quantile.clamp(low, high).to(values.dtype)
    return out


def sorted_quantile(values: Tensor, block: PaddedBlock, rank: Tensor, position: Tensor) -> Tensor:
    """[s] float64, interpolated between the order statistics `rank` and `rank` + 1 of each row of a block."""
    ordered = (values if block.inside is None else torch.where(block.inside, values, torch.inf)).sort(1).values
    lower, upper = (ordered.gather(1, r[:, None])[:, 0] for r in (rank, torch.minimum(rank + 1, block.count - 1)))
    return torch.lerp(lower.double(), upper.double(), position - rank)


def _interpolated(values: Tensor, count: Tensor, rank: Tensor, position: Tensor) -> Tensor:
    """[u] float64, interpolated between the order statistics `rank` and `rank` + 1 of each row."""
    width = values.shape[1]
    kth = int(rank.max())
    if int(count.min()) < width:  # pad so that one rank fits all rows: kth − rank below every value, the rest above
        spare = torch.arange(width, device=values.device) - count[:, None]
        below = (kth - rank)[:, None]
        values = torch.where(spare < 0, values, torch.where(spare < below, -torch.inf, torch.inf).to(values.dtype))
    lower = values.kthvalue(kth + 1, dim=1).values
    next_ = torch.where(values > lower[:, None], values, torch.inf).amin(1)
    upto = (values <= lower[:, None]).sum(1)
    upper = torch.where((upto > kth + 1) | (rank + 1 >= count), lower, next_)
    return torch.lerp(lower.double(), upper.double(), position - rank)
