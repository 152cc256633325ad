"""The model part of the local engine, and code shared by decoders. Decoders know no requests, the scheduler no
layers."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxima.data.columns import Ints
from proxima.engine.local.kv_cache import KVCache
from proxima.kernels.decode_step import Rows, TileLinear, tile_linear
from proxima.system.machine import cache_folder, processor_flags, processor_name

# row counts are padded to a multiple of this, so that the bits of a row do not depend on its neighbours
ROWS = 8
# positions summed by one float32 product: libraries split a sum depending on its length, so all use the same length
BLOCK = 64


class Decoder(Protocol):
    """A model with its own copy of the weights, in the engine's dtype.

    `routes`, of the last `prefill`, `hidden` or `step`: [n, M, K] int8 or int16, the experts to which each of its input
    tokens was routed, padding rows last; None if the decoder was not asked to record them.
    `takes_past`: `prefill` accepts a prompt's past and need not run those tokens again.
    `head`: the output layer.
    """

    routes: Tensor | None = None
    takes_past: bool = True
    head: "Matrix"

    def load(self, model: nn.Module) -> None:
        """Copy the weights of `model`, which has the same shapes."""
        ...

    def shift(self, tokens: Ints) -> int:
        """The offset from the index of a token after these to its position; not 0 for a model that counts images
        differently."""
        return 0

    def new_cache(self, slots: int) -> KVCache:
        """An empty cache for this model."""
        ...

    def prefill(self, prompts: Sequence[Ints], past: Sequence[Tensor | None] = ()) -> tuple[Tensor, list[Tensor]]:
        """Run prompts, packed. Returns each prompt's last hidden state [P, D] and its KV [layers, 2, H_kv, length, D].
        `past`, if given, has one entry per prompt: the KV of its first tokens (not of all), which are not run again."""
        ...

    def hidden(self, sequences: Sequence[Ints]) -> list[Tensor]:
        """The hidden states [T, D] of each sequence, one per token."""
        ...

    def step(self, tokens: Tensor, position: Tensor, cache: KVCache, longest: int) -> Tensor:
        """Run one token [n] int64 per row at `position` [n] int64, n a multiple of ROWS; row r is slot r of the cache.
        Returns [n, D]. `longest`: tokens of the longest row, including this one."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V] in the engine's dtype, of [n, D]."""
        count = hidden.shape[0]
        return self.head(F.pad(hidden, (0, 0, 0, padded_rows(count) - count)).to(self.head.dtype))[:count]


Attend = Callable[[int, Tensor, Tensor, float | None, int | None], Tensor]


class CachingDecoder(Decoder):
    """Base of the decoders that cache keys and values: prompts run packed, then one token per row over the cache.

    Args:
        config: gives the shapes of the attention.
        dtype: of the products and the cache.
        device: of the weights.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        self.depth = int(config.num_hidden_layers)

    def _run(self, tokens: Tensor, position: Tensor, longest: int, attend: Attend) -> Tensor:
        """tokens and position [n], all of them below `longest`, → hidden [n, D];
        `attend(layer, q [n, H, D], kv [n, 2, H_kv, D], scale, window)` → [n, H, D]."""
        raise NotImplementedError

    def _images(self, tokens: Ints) -> Tensor | None:
        """[T] the image of a token, -1 for text, where the patches of an image attend to each other; None: nowhere in
        this sequence."""
        return None

    def _positions(self, prompts: Sequence[Ints], begin: Sequence[int], position: Tensor) -> Tensor:
        """[L] or [3, L] the positions of packed prompts, each from its token `begin` on; `position` [L] if they are
        counted."""
        return position

    def new_cache(self, slots: int) -> KVCache:
        return KVCache(self.depth, slots, (2, self.kv_heads, self.head_dim), self.dtype, self.device)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Ints], past: Sequence[Tensor | None] = ()) -> tuple[Tensor, list[Tensor]]:
        hidden, kv, spans = self._forward(prompts, past)
        stacked = torch.stack([kv[layer] for layer in range(self.depth)]).permute(0, 2, 3, 1, 4)
        complete = []
        for (start, end), earlier in zip_longest(spans, past):
            kv_of_prompt = stacked[:, :, :, start:end]
            if earlier is not None:
                kv_of_prompt = torch.cat([earlier, kv_of_prompt], 3)
            complete.append(kv_of_prompt)
        return hidden[[end - 1 for _, end in spans]], complete

    @torch.no_grad()
    def hidden(self, sequences: Sequence[Ints]) -> list[Tensor]:
        hidden, _, spans = self._forward(sequences)
        return [hidden[start:end] for start, end in spans]

    def _forward(
        self, prompts: Sequence[Ints], past: Sequence[Tensor | None] = ()
    ) -> tuple[Tensor, dict[int, Tensor], list[tuple[int, int]]]:
        """Hidden states [L, D], keys and values by layer [L, 2, H_kv, D], and the span of each prompt in L; for prompts
        with a past, of the remaining tokens only."""
        begin = [0 if earlier is None else earlier.shape[3] for _, earlier in zip_longest(prompts, past)]
        tokens, position, spans = packed(prompts, self.device, begin)
        cached: dict[int, Tensor] = {}
        starts: dict[int, list[int]] = {}
        apart: list[tuple[tuple[int, int], Tensor | None, Tensor | None]] = []
        for span, earlier, prompt in zip_longest(spans, past, prompts):
            image = self._images(prompt)
            if earlier is None and image is None:
                starts.setdefault(span[1] - span[0], []).append(span[0])
            else:
                apart.append((span, earlier, image))
        alike = [torch.tensor(first)[:, None] + torch.arange(length) for length, first in starts.items()]
        alike = [rows.to(self.device) for rows in alike]

        def attend(layer: int, q: Tensor, kv: Tensor, scale: float | None, window: int | None) -> Tensor:
            cached[layer] = kv.to(self.dtype)
            out = torch.zeros_like(q)
            for rows in alike:
                key, value = kv[rows].unbind(2)
                out[rows] = causal_attention(q[rows], key, value, scale, window)
            for (start, end), earlier, image in apart:
                own = kv[start:end].transpose(0, 1)
                if earlier is None:
                    seen = []
                else:
                    seen = [earlier[layer].transpose(1, 2).to(kv.dtype)]
                key, value = torch.cat([*seen, own], 1)[:, None]
                out[start:end] = causal_attention(q[None, start:end], key, value, scale, window, image)[0]
            return out

        position = self._positions(prompts, begin, position)
        return self._run(tokens, position, max(map(len, prompts)), attend), cached, spans

    @torch.no_grad()
    def step(self, tokens: Tensor, position: Tensor, cache: KVCache, longest: int) -> Tensor:
        return self._step(cache, tokens, position, reach_of(longest, cache.capacity))

    def _step(self, cache: KVCache, tokens: Tensor, position: Tensor, reach: int) -> Tensor:
        """Run a step that reads `reach` positions of the cache."""
        rows = torch.arange(len(tokens), device=self.device)
        masks: dict[int | None, Tensor] = {}  # by window: the same for all layers that share one

        def attend(layer: int, q: Tensor, kv: Tensor, scale: float | None, window: int | None) -> Tensor:
            cache.write(layer, rows, position, kv.to(self.dtype))
            key, value = cache.read(layer, len(tokens), reach)
            if window not in masks:
                masks[window] = reach_mask(position, reach, window)
            return cached_attention(q.to(self.dtype), key, value, masks[window], scale)

        shifted = position
        if cache.shift is not None:
            shifted = (position + cache.shift[: len(tokens)]).expand(3, -1)
        return self._run(tokens, shifted, reach, attend)


def padded_rows(count: int) -> int:
    """The next multiple of ROWS."""
    return -(-count // ROWS) * ROWS


def packed(
    prompts: Sequence[Ints], device: torch.device, begin: Sequence[int]
) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Prompts, each from its position `begin` on, one after the other, padded to a multiple of ROWS: tokens [L],
    positions [L], and the span of each prompt."""
    lengths = [len(prompt) - first for prompt, first in zip(prompts, begin, strict=True)]
    ends = list(accumulate(lengths))
    padding = -sum(lengths) % ROWS
    parts = [prompt[first:] for prompt, first in zip(prompts, begin, strict=True)]
    joined = np.concatenate([*parts, np.zeros(padding, np.int32)], dtype=np.int64)
    tokens = torch.from_numpy(joined).to(device)
    positions = [torch.arange(first, first + n) for first, n in zip(begin, lengths, strict=True)]
    position = torch.cat([*positions, torch.arange(padding)]).to(device)
    return tokens, position, [(end - n, end) for end, n in zip(ends, lengths, strict=True)]


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, image: Tensor | None = None
) -> Tensor:
    """Sequences of one length: query [B, T, H, D] of their last T positions, key and value [B, S, H_kv, D] of all → [B,
    T, H, D]. Equal numbers from 0 on in `image` [S] attend to each other, whichever is first."""
    _, count, heads, _ = query.shape
    length = key.shape[1]
    repeat = heads // key.shape[2]
    q = query.transpose(1, 2)
    k = key.transpose(1, 2).repeat_interleave(repeat, dim=1)
    v = value.transpose(1, 2).repeat_interleave(repeat, dim=1)
    if count == length and (window is None or window >= length) and image is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    step = torch.arange(length, device=query.device)
    here = step[length - count :, None]
    mask = step <= here
    if image is not None:
        mask = mask | (image == image[length - count :, None]) & (image >= 0)
    mask = mask & (here - step < (window or length))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def cached_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attention of one token per row over its cached row: query [n, H, D], key and value [n, H_kv, S, D], mask [n, 1,
    1, S] → [n, H, D].

    Queries that share a key head are rows of one product: grouped attention without repeating the cache. On a CPU these
    are ordinary products, because torch's fused kernel is up to three times slower there for few queries.
    """
    rows, heads, dim = query.shape
    _, kv_heads, reach, _ = key.shape
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    if query.device.type != "cpu":
        fused = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
        return fused.reshape(rows, heads, dim)
    if scale is None:
        scale = dim**-0.5
    pairs = rows * kv_heads
    scores = torch.bmm(grouped.reshape(pairs, -1, dim), key.reshape(pairs, reach, dim).transpose(1, 2)).float()
    scores = scores.mul_(scale).view(rows, kv_heads, -1, reach).masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(-1).to(value.dtype).view(pairs, -1, reach)
    values = value.reshape(pairs, reach, dim)
    block = BLOCK if value.dtype == torch.float32 else reach
    parts = [torch.bmm(weights[..., a : a + block], values[:, a : a + block]) for a in range(0, reach, block)]
    return sum(parts[1:], parts[0]).view(rows, heads, dim)


TRIED_ROWS = (*range(ROWS, 129, ROWS), 256, 512)


class Matrix:
    """A weight [out, in] prepared for `x @ weight.T`, in the dtype of its products.

    On a CPU, bf16 weights are converted once to oneDNN's packed format instead of at every product; the result has the
    same bits, and a decode step takes about two thirds of the time (benchmarks/decode_vs_hf). With AMX, large ones use
    our own kernels (`kernels.linear`), which take about a fifth less time at 64 rows.

    Args:
        weight: the weight, or its parts, stacked along the rows.
        before: a matrix of the same shape whose memory is reused, except in oneDNN's format.
    """

    def __init__(
        self, weight: Tensor | Sequence[Rows], bias: Tensor | None, dtype: torch.dtype, before: "Matrix | None" = None
    ) -> None:
        parts = [(weight, None)] if isinstance(weight, Tensor) else weight
        first, _ = parts[0]
        self.dtype = dtype
        on_cpu = first.device.type == "cpu"
        self.packed = on_cpu and dtype == torch.bfloat16 and packs_bfloat16()
        self.tiles: TileLinear | None = None
        if self.packed:
            height = sum(len(rows) for rows, _ in parts)
            self.tiles = _tiles(height, first.shape[1])
        memory: Tensor | None = None
        bias_memory: Tensor | None = None
        if before is not None and not self.packed:
            memory = before.weight
            bias_memory = before.bias
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = joined_rows([(bias, None)], dtype, bias_memory)
        if self.tiles is not None:
            self.weight: Tensor = self.tiles.pack(parts, None if before is None else before.weight)
            if self.bias is not None:
                self.bias = self.bias.float()
            return
        joined = joined_rows(parts, dtype, memory)
        self.weight = _prepared(joined, self.packed)
        self.rows = (1, 1 << 62)
        if on_cpu:
            self.rows = row_limits(*joined.shape, dtype, self.packed, torch.get_num_threads())

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[n, in] → [n, out]; a row's bits do not depend on the others. The result may be in `out`."""
        if self.tiles is not None:
            return self.tiles(x, self.weight, self.bias, out)
        return in_rows(lambda rows: _product(rows, self.weight, self.bias, self.packed), x, self.rows)


@torch.no_grad()
def joined_rows(parts: Sequence[Rows], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Copy all parts, stacked along the rows, each with its rows in the given order; into `out` if given, which has the
    resulting shape."""
    first, _ = parts[0]
    ends = list(accumulate(len(rows) for rows, _ in parts))
    joined = out
    if joined is None:
        joined = torch.empty(ends[-1], *first.shape[1:], dtype=dtype, device=first.device)
    for (rows, order), end in zip(parts, ends, strict=True):
        joined[end - len(rows) : end] = rows if order is None else rows[order]
    return joined


def _tiles(height: int, width: int) -> TileLinear | None:
    """The AMX product for a weight of this shape; None where oneDNN is used."""
    if height % 32 or width % 32:
        return None
    return tile_linear()


def in_rows(product: Callable[[Tensor], Tensor], x: Tensor, limits: tuple[int, int]) -> Tensor:
    """product(x) [n, out] of x [n, in], in parts and with padding, so that no product is outside `row_limits`."""
    least, most = limits
    if len(x) > most:
        return torch.cat([in_rows(product, chunk, limits) for chunk in x.split(most)])
    padding = max(least, padded_rows(len(x))) - len(x)
    if padding > 0:
        return product(F.pad(x, (0, 0, 0, padding)))[: len(x)]
    return product(x)


def packs_bfloat16() -> bool:
    """True if oneDNN can multiply bf16 by a packed matrix on this CPU; on one with AVX2 alone it can't."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _prepared(weight: Tensor, packed: bool) -> Tensor:
    if not packed:
        return weight
    prepared: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    return prepared


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, packed: bool) -> Tensor:
    if packed:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


@cache
def row_limits(
    height: int, width: int, dtype: torch.dtype, packed: bool, threads: int, *, transposed: bool = False
) -> tuple[int, int]:
    """`find_row_limits`, kept in the user's cache folder: finding them takes half a second at each start of a small
    model."""
    name = f"{height}-{width}-{dtype}-{packed}-{threads}-{transposed}"
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: the user has no home folder
        kept = (_limits_folder() / name).read_text(encoding="utf-8")
        least, most = map(int, kept.split())
        return least, most
    least, most = find_row_limits(height, width, dtype, packed, threads, transposed=transposed)
    with suppress(OSError, RuntimeError):
        _limits_folder().mkdir(parents=True, exist_ok=True)
        (_limits_folder() / name).write_text(f"{least} {most}", encoding="utf-8")
    return least, most


@cache
def _limits_folder() -> Path:
    """The folder for this processor, this build of torch, the environment variables its libraries read, and this
    file."""
    facts = [torch.__version__, torch.__config__.show(), *os.uname()[4:], Path(__file__).read_text(encoding="utf-8")]
    facts += [processor_name(), *sorted(processor_flags())]
    names = ("DNNL", "ONEDNN", "MKL", "ATEN", "KMP", "OMP")
    facts += sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(names))
    return cache_folder("row-limits") / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def find_row_limits(
    height: int, width: int, dtype: torch.dtype, packed: bool, threads: int, *, transposed: bool = False
) -> tuple[int, int]:
    """Least and most rows of a CPU product [n, width] → [n, height], such that a row has the same bits whatever n is.
    `transposed`: the weight is stored as [width, height].

    Libraries choose kernels by shape and threads: with AMX, products of few rows, and bf16 ones of many, use others.
    The trials use sums whose terms cancel, so that the result consists of rounding errors, and a different order of
    summation can't hide behind the rounding of the result. Where even medium counts differ, all products have the same
    number of rows.
    """
    counts = [count for count in TRIED_ROWS if count <= 128 or count * height < 1 << 26]
    draws = torch.Generator().manual_seed(threads)
    half = -(-width // 2)
    b = torch.randn(height, half, generator=draws).to(dtype)
    a = torch.randn(counts[-1], half, generator=draws).to(dtype)
    x = torch.cat([a, -a], 1)[:, :width].contiguous()
    both = torch.cat([b, b], 1)[:, :width]
    weight = both.T.contiguous().T if transposed else _prepared(both.contiguous(), packed)
    expected = _product(x, weight, None, packed)
    differ = [n for n in counts if not torch.equal(_product(x[:n], weight, None, packed), expected[:n])]
    least = max(differ, default=0) + ROWS
    if least <= 64:
        return (least, max(512, counts[-1]))
    return (64, 64)


def reach_of(longest: int, capacity: int) -> int:
    """Cached positions that a step reads: those in use, rounded up to a multiple of 64.

    Matrix libraries sum in blocks of up to 64 (AMX) and use different kernels for very small matrices: with other
    lengths, the bits of a row would depend on the length of its neighbours.
    """
    return min(capacity, -(-longest // 64) * 64)


def reach_mask(position: Tensor, reach: int, window: int | None = None) -> Tensor:
    """[n, 1, 1, S] bool: the cached positions that a token at `position` may see."""
    past = torch.arange(reach, device=position.device)
    mask = past <= position[:, None]
    if window is not None:
        mask &= position[:, None] - past < window
    return mask[:, None, None, :]
