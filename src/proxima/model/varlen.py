"""Attention over a packed batch as one call per layer of torch's flash attention for sequences of different lengths.

`packed` pads segments to rectangles and gives the kernel a mask; this passes the lengths. A segment's queries attend to
its keys, those of its context followed by its own, causally and aligned at their ends. It needs a GPU and 16-bit
products.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from proxima.data import PackedBatch, UserError
from proxima.data.packed_batch import indices_of
from proxima.data.transfer import to_device


def varlen_attention(backbone: nn.Module, batch: PackedBatch) -> Callable[..., Tensor]:
    """`attend` of `packed_attention` for a batch; its tensors are sent to the device once.

    Raises:
        UserError: there is no GPU, products are not of 16 bits, or the model uses attention dropout.
    """
    config: Any = backbone.config
    if backbone.training and getattr(config, "attention_dropout", None):
        raise UserError("model.attention=varlen has no dropout; use model.attention=packed.")
    from torch.nn.attention.varlen import varlen_attn

    contexts = zip(pairwise(batch.edges), batch.contexts(), batch.seen, strict=True)
    rows = [(end - start, count, [*before, (start, end)]) for (start, end), before, count in contexts if end > start]
    device = batch.tokens.device
    lengths = [length for length, _, _ in rows]
    reaches = [length + count for length, count, _ in rows]
    seen = to_device(indices_of([span for _, _, spans in rows for span in spans]), device)
    ends = to_device(_ends(lengths), device), to_device(_ends(reaches), device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
        _require_flash(q)
        keys, values = (x.index_select(0, seen) for x in (k, v))
        how: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
        shared = q.shape[1] != k.shape[1]
        out: Any = varlen_attn(q, keys, values, *ends, max(lengths), max(reaches), enable_gqa=shared, **how)
        attended: Tensor = out
        return attended

    return attend


def _ends(lengths: Sequence[int]) -> Tensor:
    """[S + 1] int32: 0, and the end of each sequence."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _require_flash(query: Tensor) -> None:
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        here = f"{query.device.type} in {str(query.dtype).removeprefix('torch.')}"
        remedy = "use model.attention=packed, or model.compute_dtype=bfloat16 on a GPU"
        raise UserError(f"model.attention=varlen does not compute on {here}; {remedy}.")
