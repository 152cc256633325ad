"""Attention over a packed batch: each segment attends to what comes before it in its sequence and to itself.

`packed` is an attention function that any Hugging Face architecture calls through its attention interface: linear
layers run on the packed axis, and only inside attention are segments padded, in buckets of similar lengths. It is
exact, needs no [L, L] mask, and lets the parts that sequences share be run once.

`varlen` is torch's flash attention: it gets the lengths of the segments in one call per layer, in place of rectangles
and a mask. A segment's queries attend to its keys, those of its context followed by its own, causally and aligned at
their ends. It needs a GPU and 16-bit products. `flash3` is the same call of flash attention 3, for Hopper GPUs, a
package of its own. `padded` has one row per sequence, for every causal model.
"""

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from proxima.data import FieldError, UserError
from proxima.data.packed_batch import PackedBatch, indices_of
from proxima.data.transfer import to_device
from proxima.model.compilation import uncompiled
from proxima.model.fused import fused_states, is_plain
from proxima.model.moe import RoutingPass

NAME = "proxima_packed"
HALF = (torch.bfloat16, torch.float16)
WIDEST_HEAD = 256  # values of a head, of flash attention
HOPPER = 9  # major number of the GPUs' compute capability
FLASH3 = "flash_attn_interface"  # the module of flash attention 3
SHORT = 1 << 15  # queries x keys of a row up to which a CPU uses ordinary products
# log2 of the segment length below which all share a bucket: more buckets would cost more than the padding
SHORTEST = 4


@dataclass(frozen=True)
class ShownImages:
    """A packed batch with images, as a decoder reads it.

    Args:
        inputs: arguments of the decoder in place of the tokens and their positions.
        segments: those in which the patches of an image attend to one another; None: every token attends causally.
    """

    inputs: dict[str, Any]
    segments: "Segments | None" = None


def hidden_packed(
    backbone: nn.Module, batch: PackedBatch, routing: RoutingPass | None = None, images: ShownImages | None = None
) -> Tensor:
    rounds = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    is_text = routing is None and images is None
    if rounds and is_text and batch.tokens.device.type == "cpu" and is_plain(backbone):
        states = fused_states(backbone, batch)
        if states is not None:
            return states
    segments = None if images is None else images.segments
    if segments is None:
        segments = Segments(batch)
    return packed_states(backbone, batch, routing, images, segments=segments)


def packed_states(
    backbone: nn.Module,
    batch: PackedBatch,
    routing: RoutingPass | None,
    images: ShownImages | None,
    *,
    segments: "Segments | None" = None,
    attend: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The states that predict the response tokens, with the packed axis as one row. `segments` and `attend` are those
    of `packed_attention`."""
    inputs: Mapping[str, Any] = {"input_ids": batch.tokens[None], "position_ids": batch.position[None]}
    if images is not None:
        inputs = images.inputs
    passed = {"routing": routing, "segments": segments, "attend": attend}
    given = {name: value for name, value in passed.items() if value is not None}
    answer = backbone(**inputs, use_cache=False, **given)
    hidden: Tensor = answer.last_hidden_state[0]
    return hidden.index_select(0, batch.predict)


def hugging_face_name(path: str, *, compiled: bool = False) -> str:
    """The name of the Hugging Face attention implementation for a path; registers ours on first use. `compiled`: for
    layers that are compiled, between whose graphs it then runs in all models of this process."""
    if path == "padded":
        return "sdpa"
    from transformers import AttentionInterface

    if compiled:
        AttentionInterface.register(NAME, uncompiled(packed_attention))
    elif NAME not in AttentionInterface():
        AttentionInterface.register(NAME, packed_attention)
    return NAME


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: "Segments | None" = None,
    attend: Callable[..., Tensor] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Called by every layer in place of Hugging Face's attention. query [1, H, L, D]; key, value [1, H_kv, L, D];
    returns [1, L, H, D].

    `attend(layer, q, k, v, scale, window)`, q [L, H, D], is an engine's attention over its cache and replaces this.

    Raises:
        UserError: the architecture needs something this path lacks: soft-capped scores, attention sinks, keys and
            values of unlike sizes; or its layers do not pass on what they are called with.
    """
    if query.shape[-1] != value.shape[-1]:
        unlike = f"keys and values of different sizes, as {type(module).__name__} has"
        raise UserError(f"model.attention=packed does not support {unlike}; use model.attention=padded.")
    for name in ("softcap", "s_aux"):
        if other.get(name) is not None:
            refused = f"{name} of {type(module).__name__}"
            raise UserError(f"model.attention=packed does not support {refused}; use model.attention=padded.")
    # [L, H, D]; rotary leaves float32 under autocast
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    if attend is not None:
        return attend(module.layer_idx, q, k, v, scaling, sliding_window)[None], None
    if segments is None:
        raise UserError("packed attention was called without segments: call the model through `model.policy.Policy`.")
    return attend_segments(segments, q, k, v, scaling, sliding_window)[None], None


@dataclass(frozen=True)
class SegmentBlock:
    """R segments of similar lengths, padded to a rectangle.

    Args:
        query: [R, T] index into L, of the segment's own tokens; padding repeats token 0.
        context: [R, C] index into L, of the tokens before them in their sequences; C = 0 for prompts.
        own, seen: [R] lengths of the segments and of these contexts.
        image: [R, T] the image of a token, -1 for text; None: all attend only to what is before them.
    """

    query: Tensor
    context: Tensor
    own: Tensor
    seen: Tensor
    image: Tensor | None = None

    def mask(self, window: int | None) -> Tensor:
        """[R, 1, T, C + T] bool: True where a query attends. Padding attends to padding, so that no row is empty."""
        width = self.query.shape[1]
        step = torch.arange(width, device=self.query.device)
        past = torch.arange(self.context.shape[1], device=self.query.device)
        in_context = (past < self.seen[:, None])[:, None, :].expand(-1, width, -1)
        in_self = (step <= step[:, None])[None].expand(len(self.own), -1, -1)
        if self.image is not None:
            same_image = self.image[:, :, None] == self.image[:, None]
            in_self = in_self | same_image & (self.image >= 0)[:, None]
        if window is not None:
            position = self.seen[:, None] + step  # of the query, [R, T]
            in_context = in_context & (position[:, :, None] - past < window)
            in_self = in_self & (step[:, None] - step < window)[None]
        return torch.cat([in_context, in_self], dim=2)[:, None]


class Segments:
    """The layout of a packed batch inside attention, computed once per micro-batch and shared by all layers. Only the
    batch's host-side fields are read. `image` [L]: the patches of one image, which have the same number here, attend to
    each other, whichever is first; -1 is text; None: nothing does."""

    def __init__(self, batch: PackedBatch, image: Tensor | None = None) -> None:
        parent = batch.parents
        seen = batch.seen
        contexts = batch.contexts()
        spans = list(pairwise(batch.edges))
        device = batch.tokens.device
        buckets: dict[tuple[bool | int, ...], list[int]] = {}
        for g, (start, end) in enumerate(spans):
            if end > start:
                key = (parent[g] < 0, _size_class(end - start), _size_class(seen[g]))
                buckets.setdefault(key, []).append(g)
        self.blocks: list[SegmentBlock] = []
        self.masks: dict[tuple[int, int | None], Tensor] = {}
        inverse = torch.zeros(batch.edges[-1], dtype=torch.long)
        offset = 0
        for members in buckets.values():
            query = _rectangle([[spans[g]] for g in members])
            for row, (start, end) in enumerate(spans[g] for g in members):
                inverse[start:end] = torch.arange(end - start) + offset + row * query.shape[1]
            offset += query.numel()
            before = _rectangle([contexts[g] for g in members])
            lengths = [end - start for start, end in (spans[g] for g in members)]
            seen_lengths = [seen[g] for g in members]
            block = SegmentBlock(
                query=to_device(query, device),
                context=to_device(before, device),
                own=to_device(torch.tensor(lengths), device),
                seen=to_device(torch.tensor(seen_lengths), device),
            )
            if image is not None:
                block = replace(block, image=_of_rows(image, block))
            self.blocks.append(block)
        self.inverse = to_device(inverse, device)

    def mask(self, index: int, window: int | None) -> Tensor | None:
        """The mask of a block, computed once; None where causal attention suffices (it ignores right padding)."""
        block = self.blocks[index]
        if window is not None and window >= block.query.shape[1] + block.context.shape[1]:
            window = None
        if block.context.shape[1] == 0 and window is None and block.image is None:
            return None
        key = (index, window)
        if key not in self.masks:
            self.masks[key] = block.mask(window)
        return self.masks[key]


def _size_class(length: int) -> int:
    """Segments are computed together whose lengths round up to the same power of two."""
    return max(SHORTEST, (length - 1).bit_length())


def _of_rows(image: Tensor, block: SegmentBlock) -> Tensor | None:
    """[R, T] the images of a block's tokens, -1 in its padding; None if it has none."""
    inside = torch.arange(block.query.shape[1], device=block.own.device) < block.own[:, None]
    of_rows = torch.where(inside, image[block.query], -1)
    return of_rows if bool((of_rows >= 0).any()) else None


def _rectangle(rows: list[list[tuple[int, int]]]) -> Tensor:
    """[R, T] the indices of the spans of each row, padded with 0."""
    return pad_sequence([indices_of(spans) for spans in rows], batch_first=True)


def attend_segments(
    segments: Segments, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """[L, H, D]: each segment's tokens of q [L, H, D] attend to k, v [L, H_kv, D] of its context and of itself."""
    outputs = []
    for i, block in enumerate(segments.blocks):
        rows, width = block.query.shape
        own = block.query.reshape(-1)
        mask = segments.mask(i, window)
        seen = torch.cat([block.context, block.query], dim=1).reshape(-1)
        queries = q.index_select(0, own).view(rows, width, *q.shape[1:])
        keys = k.index_select(0, seen).view(rows, -1, *k.shape[1:])
        values = v.index_select(0, seen).view(rows, -1, *v.shape[1:])
        out = _attention(queries, keys, values, mask, scale)
        outputs.append(out.reshape(rows * width, *out.shape[2:]))
    return torch.cat(outputs).index_select(0, segments.inverse)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """q [R, T, H, D], k and v [R, S, H_kv, D], mask [R, 1, T, S] (None: causal, T = S) → [R, T, H, D].

    Queries of a key head become rows of one product, so that keys are not repeated. On a CPU short rows use ordinary
    products: the backward pass of torch's fused kernel takes several times as long there.
    """
    rows, width, heads, dim = q.shape
    _, reach, kv_heads, _ = k.shape
    repeat = heads // kv_heads
    if q.device.type == "cpu" and width * reach <= SHORT:
        if mask is None:
            mask = torch.ones(width, reach, dtype=torch.bool).tril()[None, None]
        grouped = q.view(rows, width, kv_heads, repeat, dim).permute(0, 2, 3, 1, 4)
        scores = grouped.reshape(rows, kv_heads, repeat * width, dim) @ k.permute(0, 2, 3, 1)
        if q.dtype != torch.float64:
            scores = scores.float()
        if scale is None:
            scale = dim**-0.5
        scores = scores.mul(scale).view(rows, kv_heads, repeat, width, reach)
        weights = scores.masked_fill(~mask[:, :, None], -torch.inf).softmax(-1).to(v.dtype)
        out = weights.view(rows, kv_heads, repeat * width, reach) @ v.transpose(1, 2)
        return out.view(rows, kv_heads, repeat, width, dim).permute(0, 3, 1, 2, 4).reshape(rows, width, heads, dim)
    queries = q.transpose(1, 2)
    keys = k.transpose(1, 2)
    values = v.transpose(1, 2)
    if repeat > 1:
        keys = keys.repeat_interleave(repeat, dim=1)
        values = values.repeat_interleave(repeat, dim=1)
    states = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
    return states.transpose(1, 2)


def hidden_varlen(
    backbone: nn.Module,
    batch: PackedBatch,
    routing: RoutingPass | None = None,
    images: ShownImages | None = None,
    *,
    path: str = "varlen",
) -> Tensor:
    """Flash attention for sequences of different lengths, on a GPU; `path` is a key of `FLASH`.

    Raises:
        UserError: there is no GPU, or products are not of 16 bits.
    """
    segments = None if images is None else images.segments
    return packed_states(backbone, batch, routing, images, segments=segments, attend=flash_attention(batch, path))


def flash_path(heads: Collection[int], device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the key of `FLASH` that `auto` chooses, on an Nvidia GPU since Ampere; None if none computes products of
    `dtype` on `device` with heads of these sizes. Layers may differ in theirs."""
    if dtype not in HALF or device.type != "cuda" or torch.version.hip:
        return None
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    if not heads or not 0 < max(heads) <= WIDEST_HEAD or any(size % 8 for size in heads):
        return None
    if flash3_problem(device) is None:
        return "flash3"
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11
    if "window_size" in inspect.signature(varlen_attn).parameters:
        return "varlen"
    return None


def head_sizes(model: nn.Module) -> list[int]:
    """The values of a head in each layer that names them."""
    sizes = (getattr(module, "head_dim", None) for module in model.modules())
    return [size for size in sizes if isinstance(size, int)]


@cache
def flash3_problem(device: torch.device) -> str | None:
    """Why flash attention 3 does not compute on a device; None if it does."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return "is for Hopper GPUs (H100, H200)"
    try:
        importlib.import_module(FLASH3)
    except ModuleNotFoundError as error:
        if error.name == FLASH3:
            return f"is not installed (package flash-attn-3, module {FLASH3})"
        return f"can't be imported: {error}"
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch
        return f"can't be imported: {error}"
    return None


def why_flash(path: str, device: torch.device) -> str:
    """Why `auto` has chosen a key of `FLASH` on a device."""
    if path == "flash3":
        return "flash attention 3 is installed for this GPU"
    return f"the GPU has flash attention 2, torch's own; flash attention 3 {flash3_problem(device)}"


def require_flash3(attention: str, device: torch.device) -> None:
    """Raise FieldError for `model.attention=flash3` on a GPU where it does not compute; what has no GPU is found out by
    its first pass, as for `varlen`."""
    if attention != "flash3" or device.type != "cuda":
        return
    problem = flash3_problem(device)
    if problem is not None:
        raise FieldError("model.attention", attention, problem, remedy="install it, or set model.attention=auto")


def flash_attention(batch: PackedBatch, path: str = "varlen") -> Callable[..., Tensor]:
    """`attend` of `packed_attention` for a batch, by a key of `FLASH`; its tensors are sent to the device once."""
    compute = FLASH[path]()
    device = batch.tokens.device
    lengths = list[int]()
    reaches = list[int]()
    spans = list[tuple[int, int]]()
    for (start, end), before, count in zip(pairwise(batch.edges), batch.contexts(), batch.seen, strict=True):
        if end > start:
            lengths.append(end - start)
            reaches.append(end - start + count)
            spans += [*before, (start, end)]
    seen = to_device(indices_of(spans), device)
    ends = to_device(_ends(lengths), device), to_device(_ends(reaches), device)
    longest = max(lengths), max(reaches)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
        _require_flash(q, path)
        keys = k.index_select(0, seen)
        values = v.index_select(0, seen)
        before = -1 if window is None else window - 1  # keys before the query that it attends to; -1: all
        return compute(q, keys, values, *ends, *longest, scale, before)

    return attend


def _torch_kernel() -> Callable[..., Tensor]:
    """Torch's flash attention: q [L, H, D], keys and values [M, H_kv, D], the ends of both, the longest of both."""
    from torch.nn.attention.varlen import varlen_attn

    takes_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # since torch 2.12

    def compute(q: Tensor, keys: Tensor, values: Tensor, *lengths_scale_before: Any) -> Tensor:
        *lengths, scale, before = lengths_scale_before
        options: dict[str, Any] = {"scale": scale, "window_size": (before, 0)}
        if takes_groups:
            options["enable_gqa"] = q.shape[1] != keys.shape[1]
        elif q.shape[1] != keys.shape[1]:
            repeat = q.shape[1] // keys.shape[1]
            keys = keys.repeat_interleave(repeat, dim=1)
            values = values.repeat_interleave(repeat, dim=1)
        out: Any = varlen_attn(q, keys, values, *lengths, **options)
        attended: Tensor = out
        return attended

    return compute


def _flash3_kernel() -> Callable[..., Tensor]:
    """Flash attention 3 with the arguments of `_torch_kernel`. Heads of keys are read by their group of queries."""
    function: Any = importlib.import_module(FLASH3).flash_attn_varlen_func

    def compute(q: Tensor, keys: Tensor, values: Tensor, *lengths_scale_before: Any) -> Tensor:
        ends, ends_of_keys, longest, longest_of_keys, scale, before = lengths_scale_before
        out: Any = function(
            q,
            keys,
            values,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends_of_keys,
            max_seqlen_q=longest,
            max_seqlen_k=longest_of_keys,
            softmax_scale=scale,
            causal=True,
            window_size=(before, 0),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        attended: Tensor = out[0] if isinstance(out, tuple) else out  # its first releases also give sums of rows
        return attended

    return compute


def _ends(lengths: Sequence[int]) -> Tensor:
    """[S + 1] int32: 0, and the end of each sequence."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _require_flash(query: Tensor, path: str) -> None:
    if not query.is_cuda or query.dtype not in HALF:
        here = f"{query.device.type} in {str(query.dtype).removeprefix('torch.')}"
        remedy = "use model.attention=packed, or model.compute_dtype=bfloat16 on a GPU"
        raise UserError(f"model.attention={path} does not compute on {here}; {remedy}.")


def hidden_padded(
    backbone: nn.Module, batch: PackedBatch, routing: RoutingPass | None = None, images: ShownImages | None = None
) -> Tensor:
    """One right-padded row per sequence: for every causal model, state-space models too; the slowest."""
    if routing is not None:
        raise UserError("model.attention=padded records and replays no routes; use model.attention=packed.")
    prompts = list[Tensor]()
    rows = list[Tensor]()
    for segment, parent in enumerate(batch.parents):
        if parent >= 0:
            prompt = batch.tokens[batch.edges[parent] : batch.edges[parent + 1]]
            response = batch.tokens[batch.edges[segment] : batch.edges[segment + 1]]
            prompts.append(prompt)
            rows.append(torch.cat([prompt, response]))
    tokens = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    predict = []
    for row, (count, prompt) in enumerate(zip(batch.tokens_of, prompts, strict=True)):
        first = row * tokens.shape[1] + len(prompt) - 1
        predict.append(torch.arange(count, device=tokens.device) + first)
    answer = backbone(input_ids=tokens, attention_mask=mask, use_cache=False)
    hidden: Tensor = answer.last_hidden_state.flatten(0, 1)
    return hidden.index_select(0, torch.cat(predict))


#: path → makes the kernel that attends to sequences of different lengths
FLASH: Mapping[str, Callable[[], Callable[..., Tensor]]] = {"flash3": _flash3_kernel, "varlen": _torch_kernel}

#: path → the states [N, D] that predict the response tokens
ATTENTION: Mapping[str, Callable[..., Tensor]] = {
    "packed": hidden_packed,
    "varlen": hidden_varlen,
    "flash3": partial(hidden_varlen, path="flash3"),
    "padded": hidden_padded,
}
