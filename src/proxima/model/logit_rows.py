"""Logits in float32, as many rows at once as fit in a cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS = 8  # rows of logits processed at once after the product: they stay in the cache


def row_blocks(logits: Tensor, temperature: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of `logits`, in float32 and divided by the temperature; on a GPU all rows at once. The caller
    deletes each block before it asks for the next."""
    step = ROWS if logits.device.type == "cpu" else max(1, len(logits))
    for at in range(0, len(logits), step):
        rows = slice(at, at + step)
        exact = logits[rows].to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        yield rows, exact.div_(temperature[rows, None])
        del exact
