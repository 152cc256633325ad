"""Sums, counts, means, prefix sums and quantiles of packed sequences without a Python loop over them, and subsets of
tokens that depend neither on the tokens' order nor on a random state.

Every function of sequences takes `cu_seqlens` [S+1]; sequence s is `cu_seqlens[s]:cu_seqlens[s+1]` and may be empty.

Determinism on CUDA, for all of `core`: `segment_reduce` adds each segment in a fixed order, forward and backward.
`index_add` (`group_sum`, `optimal_token_baseline`, the buckets of `mismatch_metrics`) adds in any order unless
`torch.use_deterministic_algorithms(True)` is set. So does a float `cumsum`, which that switch refuses; under it the
prefix sums of `cppo`, `m2po`, `second_moment`, `gae` and the like are matrix products (`prefix_sums`),
deterministic with `CUBLAS_WORKSPACE_CONFIG=:4096:8`. Counts are integers. On a CPU, everything is deterministic.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from proxima.data.random import finalize


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
    """[S], the sum of `values` [N] over each sequence, 0 for an empty one; differentiable. Accumulated in float64,
    returned in the dtype of `values`; no other sequence affects it, not even its last bit."""
    lengths = cu_seqlens.diff().long()
    if len(lengths) == 0:
        return values.new_zeros(0) + values.sum() * 0
    sums: Tensor = torch.segment_reduce(values.double(), "sum", lengths=lengths, initial=0.0, unsafe=True)
    return sums.to(values.dtype)


def segment_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S], the mean of `values` [N] over the tokens of `mask` in each sequence, 0 if it has none; differentiable."""
    total = segment_sum(torch.where(mask, values, 0.0), cu_seqlens)
    return total / segment_count(mask, cu_seqlens).clamp(min=1)


COLUMNS = 64  # of a row that one matrix product sums up
SPARED = 1 << 16  # cells of padding that are worth another table


@dataclass(frozen=True)
class SequenceRows:
    """The n tokens of a mask, with each sequence as a row. Values are [n], one row after the other.

    Sums and quantiles are computed in tables, right-padded: one operation over the columns serves all rows at once.
    Rows of very different lengths are in different tables, so that a long one does not pad all others.

    Args:
        count: [S] int64, the tokens of each row.
        tokens: [n] int64, their positions on the packed axis.
        row, column: [n] int64, the row of each token, and the number of tokens before it in that row.
        sizes: rows and columns of each table.
        order: [S] int64, the rows in the order of the tables.
        cells: [n] int64, the cell of each token, numbered through all tables.
    """

    count: Tensor
    tokens: Tensor
    row: Tensor
    column: Tensor
    sizes: Sequence[tuple[int, int]]
    order: Tensor
    cells: Tensor

    @classmethod
    def of(cls, mask: Tensor, cu_seqlens: Tensor, lengths: Sequence[int] | None = None) -> "SequenceRows":
        """Args: mask [N] bool; lengths: the counts, if the host knows them; None costs a device sync."""
        count = segment_count(mask, cu_seqlens)
        if lengths is None:
            lengths = count.tolist()
        tokens = torch.nonzero_static(mask, size=sum(lengths)).flatten()
        row = torch.arange(len(count), device=mask.device).repeat_interleave(count, output_size=len(tokens))
        column = torch.arange(len(tokens), device=mask.device) - (count.cumsum(0) - count)[row]
        sizes = _table_sizes(lengths)
        starts = list[Tensor]()
        end = 0
        table = torch.zeros_like(count)
        for rows, width in sizes:
            table += count <= width
            starts.append(torch.arange(end, end + rows * width, width, device=mask.device))
            end += rows * width
        order = table.argsort(stable=True)
        start = torch.empty_like(count).index_copy_(0, order, torch.cat(starts))
        return cls(count, tokens, row, column, sizes, order, start[row] + column)

    def packed(self, values: Tensor, like: Tensor) -> Tensor:
        """[n] → [N] in the dtype of `like` [N], 0 at the tokens outside the mask."""
        return torch.zeros_like(like).index_copy_(0, self.tokens, values.to(like.dtype))

    def prefix_sums(self, values: Tensor) -> Tensor:
        """[n] the sum of each row up to and including each token."""
        return self._along(prefix_sums, values)

    def suffix_sums(self, values: Tensor, factor: float = 1.0) -> Tensor:
        """[n] y_t = x_t + factor y_{t+1}, from the last token of each row to the first."""
        return self._along(partial(suffix_sums, factor=factor), values)

    def quantile(self, values: Tensor, q: float) -> Tensor:
        """[S] float64, the q-quantile of each row, linearly interpolated; meaningless for a row without tokens."""
        last = (self.count - 1).clamp(min=0)
        position = q * last.double()
        rank = position.long()
        ranks = torch.stack([rank, torch.minimum(rank + 1, last)], 1)
        wanted = ranks[self.order].split([rows for rows, _ in self.sizes])
        tables = zip(self._tables(values, torch.inf), wanted, strict=True)
        of_tables = [table.sort(1).values.gather(1, at) for table, at in tables]
        neighbours = torch.cat(of_tables).double()
        lower, upper = torch.empty_like(neighbours).index_copy_(0, self.order, neighbours).unbind(1)
        return torch.lerp(lower, upper, position - rank)

    def _along(self, sums: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        summed = [sums(table).flatten() for table in self._tables(values, 0.0)]
        return torch.cat(summed)[self.cells]

    def _tables(self, values: Tensor, padding: float) -> list[Tensor]:
        areas = [rows * width for rows, width in self.sizes]
        cells = values.new_full((sum(areas),), padding).index_copy_(0, self.cells, values)
        return [part.view(size) for part, size in zip(cells.split(areas), self.sizes, strict=True)]


def _table_sizes(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Rows and columns of each table, longest rows first. Rows less than a quarter as long as the longest go to another
    table if that saves enough padding."""
    left = sorted(lengths)
    sizes = list[tuple[int, int]]()
    while True:
        longest = left[-1] if left else 0
        shorter = bisect_left(left, longest / 4)
        if shorter * longest * 3 / 4 < SPARED:
            return [*sizes, (len(left), max(1, longest))]
        sizes.append((len(left) - shorter, longest))
        left = left[:shorter]


def prefix_sums(rows: Tensor) -> Tensor:
    """[s, T] the sum of each row up to and including each column. See `suffix_sums` for CUDA."""
    if _refuses_cumsum(rows):
        return suffix_sums(rows.flip(1)).flip(1)
    return rows.cumsum(1)


def suffix_sums(rows: Tensor, factor: float = 1.0) -> Tensor:
    """[s, T] y_t = x_t + factor y_{t+1}, from the last column of each row to the first.

    The sums within `COLUMNS` columns are one product with the powers of `factor`; the first of each are then summed in
    the same way. Nothing is divided by a power, which may have underflowed: any factor in [0, 1] is as exact as a loop.
    If `factor` is 1, it is a cumsum, except on CUDA under `torch.use_deterministic_algorithms`, which refuses it.
    """
    count = len(rows)
    size = min(COLUMNS, rows.shape[1])
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
    distance = (column - column[:, None]).clamp(min=0)
    return factor ** (size - column), (factor**distance).triu()


def _refuses_cumsum(rows: Tensor) -> bool:
    return rows.is_cuda and torch.are_deterministic_algorithms_enabled()


def value_hash(*values: Tensor) -> Tensor:
    """[N] int64, a hash of the values alone: their float64 bits, mixed by `finalize`. Sorting by it shuffles tokens
    independently of their order."""
    mixed = torch.zeros(values[0].shape, dtype=torch.int64, device=values[0].device)
    for value in values:
        mixed = finalize(mixed ^ value.detach().double().contiguous().view(torch.int64))
    return mixed


def smallest_tokens(keys: Tensor, mask: Tensor, count: Tensor, ties: Tensor | None = None) -> Tensor:
    """[N] bool: the `count` [] int tokens of the mask with the smallest keys, or all if the mask has fewer. Equal keys
    are ordered by `ties`, or by position without it."""
    if ties is None:
        order = torch.arange(len(mask), device=mask.device)
    else:
        order = ties.argsort(stable=True)
    order = order[keys[order].argsort(stable=True)]
    order = order[(~mask[order]).to(torch.uint8).argsort(stable=True)]  # tokens of the mask first
    among_first = torch.arange(len(mask), device=mask.device) < count
    return torch.zeros_like(mask).scatter(0, order, among_first) & mask


def second_moment_keep(squares: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """[N] bool: the tokens of the mask except the largest `squares`, dropped until the mean of the rest is below
    `threshold`; at least one is kept."""
    ordered, order = torch.where(mask, squares.detach().double(), torch.inf).sort(stable=True)
    place = torch.arange(len(mask), device=mask.device)
    inside = place < mask.sum()
    running_mean = prefix_sums(torch.where(inside, ordered, 0.0)[None])[0] / (place + 1)  # ascending
    kept = place < (inside & (running_mean < threshold)).sum().clamp(min=1)
    return torch.zeros_like(mask).scatter(0, order, kept) & mask
