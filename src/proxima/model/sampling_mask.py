"""Sums over the tokens that could be sampled, from blocks of logits that hold the whole vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that could be sampled at N positions.

    Args:
        ids: [M] int64, those of each position after those of the one before, without duplicates.
        cu: [N+1] int64, 0 … M; position n kept `ids[cu[n]:cu[n+1]]`. An empty set stands for the whole vocabulary.
        host_cu: `cu` on the host; None: it is copied when it is needed.
        source: the complete sets, if these ids are only this rank's part of them.
    """

    ids: Tensor
    cu: Tensor
    host_cu: Sequence[int] | None = None
    source: "KeptTokens | None" = None

    @cached_property
    def edges(self) -> Sequence[int]:
        """`cu` on the host."""
        if self.host_cu is not None:
            return self.host_cu
        edges: list[int] = self.cu.tolist()
        return edges

    @cached_property
    def whole(self) -> bool:
        """True if no set is empty."""
        if self.source is not None:
            return self.source.whole
        return all(a < b for a, b in zip(self.edges, self.edges[1:], strict=False))

    @property
    def given(self) -> Tensor:
        """[N] bool: the positions whose set is not empty."""
        return (self.source or self).cu.diff() > 0

    def of(self, block: Tensor, start: int) -> "KeptEntries":
        """The kept entries of a block [n, V] of rows, the first of which is position `start`."""
        end = start + len(block)
        lengths = self.cu[start : end + 1].diff()
        ids = self.ids[self.edges[start] : self.edges[end]]
        row = torch.repeat_interleave(torch.arange(len(block), device=ids.device), lengths, output_size=len(ids))
        elsewhere = None if self.source is None else self.given[start:end] & (lengths == 0)
        return KeptEntries(ids, row, lengths, block[row, ids], elsewhere)


@dataclass(frozen=True)
class KeptEntries:
    """Entries of a block of n rows.

    Args:
        ids, row: [m] int64, the kept tokens and the row of each.
        lengths: [n] int64, the number that each row keeps.
        values: [m], the entries.
        elsewhere: [n] bool, rows whose kept entries are all on other ranks; None: there are no other ranks.
    """

    ids: Tensor
    row: Tensor
    lengths: Tensor
    values: Tensor
    elsewhere: Tensor | None = None

    def logsumexp(self, otherwise: Tensor, scale: float = 1.0) -> Tensor:
        """[n] logsumexp of `scale` times the entries of each row; for a row without kept entries the value of
        `otherwise` [n], or -inf where its kept entries are elsewhere.

        A row is summed in the order of its ids, in float64 except on devices without it, and does not depend on other
        rows.
        """
        if self.elsewhere is not None:
            otherwise = otherwise.masked_fill(self.elsewhere, -torch.inf)
        values = self.values if scale == 1 else scale * self.values
        top = otherwise.scatter_reduce(0, self.row, values, "amax", include_self=False)
        exact = values if values.device.type == "mps" else values.double()
        total = torch.segment_reduce((exact - top[self.row]).exp(), "sum", lengths=self.lengths, unsafe=True)
        return torch.where(self.lengths > 0, top + total.log().to(top.dtype), otherwise)
