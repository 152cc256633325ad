"""The states of a packed batch by other attention than `packed`: torch's flash attention, and a row per sequence.

`packed` pads segments to rectangles and gives the kernel a mask; `varlen` passes the lengths of the segments in one
call per layer. A segment's queries attend to its keys, those of its context followed by its own, causally and aligned
at their ends. It needs a GPU and 16-bit products.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from proxima.data import UserError
from proxima.data.packed_batch import PackedBatch, indices_of
from proxima.data.transfer import to_device
from proxima.model.attention import HALF, packed_states


def hidden_varlen(backbone: nn.Module, batch: PackedBatch, **more: Any) -> Tensor:
    """Torch's flash attention for sequences of different lengths, on a GPU.

    Raises:
        UserError: there is no GPU, products are not of 16 bits, or the model uses attention dropout.
    """
    config: Any = backbone.config
    if backbone.training and getattr(config, "attention_dropout", None):
        raise UserError("model.attention=varlen has no dropout; use model.attention=packed.")
    return packed_states(backbone, batch, attend=_flash_attention(batch), **more)


def _flash_attention(batch: PackedBatch) -> Callable[..., Tensor]:
    """`attend` of `packed_attention` for a batch; its tensors are sent to the device once."""
    from torch.nn.attention.varlen import varlen_attn

    takes_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # since torch 2.12
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
        if takes_groups:
            how["enable_gqa"] = q.shape[1] != k.shape[1]
        elif q.shape[1] != k.shape[1]:
            keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values))
        out: Any = varlen_attn(q, keys, values, *ends, max(lengths), max(reaches), **how)
        attended: Tensor = out
        return attended

    return attend


def _ends(lengths: Sequence[int]) -> Tensor:
    """[S + 1] int32: 0, and the end of each sequence."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _require_flash(query: Tensor) -> None:
    if not query.is_cuda or query.dtype not in HALF:
        here = f"{query.device.type} in {str(query.dtype).removeprefix('torch.')}"
        remedy = "use model.attention=packed, or model.compute_dtype=bfloat16 on a GPU"
        raise UserError(f"model.attention=varlen does not compute on {here}; {remedy}.")


def hidden_padded(backbone: nn.Module, batch: PackedBatch, **more: Any) -> Tensor:
    """One right-padded row per sequence: for every causal model, state-space models too; the slowest."""
    if "routing" in more:
        raise UserError("model.attention=padded records and replays no routes; use model.attention=packed.")
    cut, parent = batch.edges, batch.parents
    spans = [(cut[p], cut[p + 1], cut[g], cut[g + 1]) for g, p in enumerate(parent) if p >= 0]
    rows = [torch.cat([batch.tokens[a:b], batch.tokens[c:d]]) for a, b, c, d in spans]
    tokens = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    predict = [
        torch.arange(count, device=tokens.device) + row * tokens.shape[1] + b - a - 1
        for row, (count, (a, b, _, _)) in enumerate(zip(batch.tokens_of, spans, strict=True))
    ]
    answer = backbone(input_ids=tokens, attention_mask=mask, use_cache=False)
    hidden: Tensor = answer.last_hidden_state.flatten(0, 1)
    return hidden.index_select(0, torch.cat(predict))
