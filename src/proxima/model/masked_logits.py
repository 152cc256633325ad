"""Sums over the tokens of a sampling mask, from blocks of logits of the whole vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedSamplingMask:
    """The sampling masks of N positions of a packed batch: the tokens that could be sampled.

    Args:
        ids: [M] int64, those of each position after those of the one before, without duplicates.
        cu: [N+1] int64, 0 … M; position n has `ids[cu[n]:cu[n+1]]`. An empty mask stands for the whole vocabulary.
        host_cu: `cu` on the host; None: it is copied when it is needed.
        source: the complete masks, if these ids are only this rank's part of them.
    """

    ids: Tensor
    cu: Tensor
    host_cu: Sequence[int] | None = None
    source: "PackedSamplingMask | None" = None

    @cached_property
    def edges(self) -> Sequence[int]:
        """`cu` on the host."""
        if self.host_cu is not None:
            return self.host_cu
        edges: list[int] = self.cu.tolist()
        return edges

    @cached_property
    def complete(self) -> bool:
        """True if no mask is empty."""
        if self.source is not None:
            return self.source.complete
        return all(a < b for a, b in zip(self.edges, self.edges[1:], strict=False))

    @property
    def present(self) -> Tensor:
        """[N] bool: the positions whose mask is not empty."""
        return (self.source or self).cu.diff() > 0

    def of(self, block: Tensor, start: int) -> "MaskedLogits":
        """The masked logits of a block [n, V] of rows, the first of which is position `start`."""
        end = start + len(block)
        lengths = self.cu[start : end + 1].diff()
        ids = self.ids[self.edges[start] : self.edges[end]]
        row = torch.repeat_interleave(torch.arange(len(block), device=ids.device), lengths, output_size=len(ids))
        elsewhere = None
        if self.source is not None:
            elsewhere = self.present[start:end] & (lengths == 0)
        return MaskedLogits(ids, row, lengths, block[row, ids], elsewhere)


@dataclass(frozen=True)
class MaskedLogits:
    """The logits of a block of n rows whose tokens are in the masks of these rows.

    Args:
        ids, row: [m] int64, the tokens and the row of each.
        lengths: [n] int64, the number of them in each row.
        values: [m], the logits.
        elsewhere: [n] bool, rows whose masked logits are all on other ranks; None: there are no other ranks.
    """

    ids: Tensor
    row: Tensor
    lengths: Tensor
    values: Tensor
    elsewhere: Tensor | None = None

    def logsumexp(self, otherwise: Tensor, scale: float = 1.0) -> Tensor:
        """[n] logsumexp of `scale` times the masked logits of each row; for a row without any the value of
        `otherwise` [n], or -inf where they are on other ranks.

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
