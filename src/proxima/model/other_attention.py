"""The states of a packed batch by other attention than `packed`: torch's flash attention for sequences of different
lengths, and Hugging Face's own, for architectures that need it."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from proxima.data import PackedBatch, UserError
from proxima.data.packed_batch import indices_of
from proxima.data.transfer import to_device
from proxima.model.attention import packed_states


def hidden_varlen(backbone: nn.Module, batch: PackedBatch, **more: Any) -> Tensor:
    """One call of torch's flash attention per layer, on a GPU."""
    from proxima.model.varlen import varlen_attention

    return packed_states(backbone, batch, attend=varlen_attention(backbone, batch), **more)


def hidden_native(backbone: nn.Module, batch: PackedBatch, **more: Any) -> Tensor:
    """Hugging Face detects packed sequences from positions, but only without a mask; with one it mixes them."""
    if 2 * sum(parent >= 0 for parent in batch.parents) != len(batch.parents):
        raise UserError("model.attention=native can't share prompts; set model.share_prompt=false.")
    return packed_states(backbone, batch, **more)


def hidden_mask(backbone: nn.Module, batch: PackedBatch, **more: Any) -> Tensor:
    """A 4-D additive mask [1, 1, L, L]: for every architecture that takes one; needs L² memory."""
    count = len(batch.tokens)
    device = batch.tokens.device
    hidden = torch.ones(count, count, dtype=torch.bool)
    for (start, end), context in zip(pairwise(batch.edges), batch.contexts(), strict=True):
        hidden[start:end, indices_of(context)] = False
        hidden[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
    dtype = next(backbone.parameters()).dtype
    mask = torch.zeros(1, 1, count, count, dtype=dtype, device=device)
    mask.masked_fill_(to_device(hidden, device), torch.finfo(dtype).min)
    # an architecture with several kinds of layers needs one mask for each: windows are not supported here
    config: Any = backbone.config
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and _longest(batch) > window:
        raise UserError("model.attention=mask does not know sliding windows; use model.attention=packed or padded.")
    return packed_states(backbone, batch, attention_mask=mask, **more)


def _longest(batch: PackedBatch) -> int:
    """The length in tokens of the longest sequence that is fed."""
    return max((b - a + seen for (a, b), seen in zip(pairwise(batch.edges), batch.seen, strict=True)), default=0)


def hidden_padded(backbone: nn.Module, batch: PackedBatch, **more: Any) -> Tensor:
    """One right-padded row per sequence: for every causal model, state-space models too; the slowest."""
    if "routing" in more:
        raise UserError("model.attention=padded records and replays no routes; use model.attention=packed.")
    cut, parent = batch.edges, batch.parents
    spans = [(cut[p], cut[p + 1], cut[g], cut[g + 1]) for g, p in enumerate(parent) if p >= 0]
    width = max((b - a + d - c) for a, b, c, d in spans)
    tokens = batch.tokens.new_zeros(len(spans), width)
    mask = torch.zeros_like(tokens)
    lengths = batch.tokens_of
    predict = []
    for row, (a, b, c, d) in enumerate(spans):
        size = b - a + d - c
        tokens[row, :size] = torch.cat([batch.tokens[a:b], batch.tokens[c:d]])
        mask[row, :size] = 1
        predict.append(torch.arange(lengths[row], device=tokens.device) + row * width + b - a - 1)
    answer = backbone(input_ids=tokens, attention_mask=mask, use_cache=False)
    hidden: Tensor = answer.last_hidden_state.flatten(0, 1)
    return hidden.index_select(0, torch.cat(predict))
