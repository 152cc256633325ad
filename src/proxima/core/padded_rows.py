"""Some tokens of packed sequences as padded rows [S, T], and the sums and quantiles of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from proxima.core.segment import segment_count

COLUMNS = 64  # of a row that one matrix product sums up


@dataclass(frozen=True)
class PaddedRows:
    """The tokens of a mask, each sequence a row, right-padded with 0: one sum over T columns serves all at once.

    Args:
        count: [S, 1] int64, the tokens of each row.
        tokens: [n] int64, their positions on the packed axis. row, column: [n] int64, their places in the rows.
        width: T, the largest count, but at least 1.
    """

    count: Tensor
    tokens: Tensor
    row: Tensor
    column: Tensor
    width: int

    @classmethod
    def of(cls, mask: Tensor, cu_seqlens: Tensor, lengths: Sequence[int] | None = None) -> "PaddedRows":
        """Args: mask [N] bool; lengths: the counts, if the host knows them; None costs a device sync."""
        count = segment_count(mask, cu_seqlens)
        lengths = count.tolist() if lengths is None else lengths
        tokens = torch.nonzero_static(mask, size=sum(lengths)).flatten()
        row = torch.arange(len(count), device=mask.device).repeat_interleave(count, output_size=len(tokens))
        column = torch.arange(len(tokens), device=mask.device) - (count.cumsum(0) - count)[row]
        return cls(count[:, None], tokens, row, column, max(1, *lengths, 0))

    @property
    def inside(self) -> Tensor:
        """[S, T] bool, False at padding."""
        return torch.arange(self.width, device=self.count.device) < self.count

    def padded(self, values: Tensor) -> Tensor:
        """[N] → [S, T], 0 at padding."""
        out = values.new_zeros(len(self.count), self.width)
        out[self.row, self.column] = values[self.tokens]
        return out

    def packed(self, rows: Tensor, like: Tensor) -> Tensor:
        """[S, T] → [N] in the dtype of `like` [N], 0 at the tokens outside the mask."""
        out = torch.zeros_like(like)
        out[self.tokens] = rows[self.row, self.column].to(like.dtype)
        return out

    def quantile(self, rows: Tensor, q: float) -> Tensor:
        """[S, 1] float64, the q-quantile of each row [S, T], linearly interpolated; of no meaning in a row without
        tokens."""
        last = (self.count - 1).clamp(min=0)
        position = q * last.double()
        rank = position.long()
        ordered = torch.where(self.inside, rows, torch.inf).sort(1).values
        lower, upper = (ordered.gather(1, at).double() for at in (rank, torch.minimum(rank + 1, last)))
        return torch.lerp(lower, upper, position - rank)


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
