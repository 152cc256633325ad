"""A decode step in bf16 on a CPU: the operations between its matrix products (`step.cpp`), the products on the tiles of
AMX (`linear.cpp`), and the draw of one token per row from logits (`sample.cpp`)."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from proxima.kernels.compiled import PRODUCTS, functions, has_tiles, library, unavailable

HERE = Path(__file__).parent
ARGUMENTS = {"norm": "pppfpnn", "attend": "pppfpppppppfnnn", "swiglu": "ppnn"}
COLUMNS = 32  # the kernel reads a row by so many logits
Draw = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Rows = tuple[Tensor, Tensor | None]  # a weight [o, in], and the order [o] int64 of its rows; None: unchanged
SIDE = 16  # outputs per tile
DEPTH = 32  # inputs per product


class StepKernels:
    """Functions over contiguous CPU tensors of n rows, bf16 unless said otherwise. They write `out` and return it.

    A row's bits depend on that row alone.

    Args:
        compiled: the library of `step.cpp`, for this head size.
    """

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._calls = functions(compiled, ARGUMENTS)

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """Add delta [n, D] to x [n, D] float32 in place and return its RMS norm [n, D]. `weight` [D] float32."""
        self._calls["norm"](x, delta, weight, eps, out, *x.shape)
        return out

    def attend(
        self,
        qkv: Tensor,
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        turns: Tensor,
        position: Tensor,
        layer: Tensor,
        leaders: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Normalise and rotate queries and keys, write keys and values into the cache, and attend to it: [n, H * D].

        Args:
            qkv: [n, (H + 2 H_kv) * D], queries, keys, values.
            norms: [D] float32, the norm weights of queries and keys, or None; `eps` is for these.
            turns: [length, D / 2] complex64, the rotary embedding of each position; pairs are neighbours.
            position: [n] int64, of each row's token.
            layer: [2, slots, H_kv, capacity, D] of `KVCache`; row r is slot r.
            leaders: [2, slots] int64 of `KVCache`.
        """
        keys, values = layer
        _, kv_heads, capacity, dim = keys.shape
        sizes = len(qkv), kv_heads, capacity
        self._calls["attend"](qkv, *norms, eps, turns, position, *leaders, keys, values, out, dim**-0.5, *sizes)
        return out

    def swiglu(self, gate_up: Tensor, out: Tensor) -> Tensor:
        """silu(gate) * up [n, F] of [n, 2 F]."""
        self._calls["swiglu"](gate_up, out, *out.shape)
        return out


@cache
def step_kernels(head_dim: int, group: int) -> StepKernels | None:
    """The kernels for heads of `head_dim` and `group` query heads per key head; None if the machine has none.
    Sizes are multiples of 32."""
    if unavailable(PRODUCTS):
        return None
    return StepKernels(library(HERE / "step.cpp", f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}"))


@cache
def sample_kernel() -> Draw | None:
    """draw(logits [n, V] bf16, temperature [n], uniform [n]) returns tokens [n] int64 and their log-probs [n] float32,
    as `sampler.sample_tokens` without truncation. The cumulative sums are float64. None if the machine has no
    kernels."""
    if unavailable(PRODUCTS):
        return None
    sample = functions(library(HERE / "sample.cpp"), {"sample": "pppppnn"})["sample"]

    def draw(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        last = logits.shape[1] - 1
        if missing := -logits.shape[1] % COLUMNS:  # tokens of no probability are never drawn
            logits = F.pad(logits, (0, missing), value=-torch.inf)
        tokens = torch.empty(len(logits), dtype=torch.long)
        log_probs = torch.empty(len(logits))
        sample(logits, temperature.float().contiguous(), uniform.contiguous(), tokens, log_probs, *logits.shape)
        return tokens.clamp_(max=last), log_probs  # a row of NaN, which the caller finds, has no largest token

    return draw


class TileLinear:
    """x [n, in] bf16 times a packed weight [out, in], both sizes multiples of 32; a row's bits depend on it alone.

    Args:
        compiled: the library of `linear.cpp`.
    """

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._calls = functions(compiled, {"linear": "ppppnnn", "pack": "pppnn"})

    def pack(self, parts: Sequence[Rows], out: Tensor | None = None) -> Tensor:
        """Pack parts [o, in], one below the other, each in its order of rows, as [out / 32, in / 32, 2, 16, 16, 2]: two
        tiles of 16 outputs at a time, inputs in pairs. Written to `out` if given."""
        if any(len(weight) % (2 * SIDE) for weight, _ in parts):
            in_order = [weight if order is None else weight[order] for weight, order in parts]
            parts = [(torch.cat(in_order), None)]
        height = sum(len(weight) for weight, _ in parts)
        width = parts[0][0].shape[1]
        if out is None:
            sizes = height // (2 * SIDE), width // DEPTH, 2, SIDE, DEPTH // 2, 2
            out = torch.empty(sizes, dtype=torch.bfloat16)
        at = 0
        for weight, order in parts:
            here = out[at : at + len(weight) // (2 * SIDE)]
            self._calls["pack"](weight.detach().float().contiguous(), order, here, *weight.shape)
            at += len(here)
        return out

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """[n, out] bf16, x times the weight of `pack(weight)` plus bias [out] float32; written to `out` if given."""
        x = x.contiguous()
        if out is None:
            out = x.new_empty(len(x), weight.shape[0] * 2 * SIDE)
        self._calls["linear"](x, weight, bias, out, *x.shape, out.shape[1])
        return out


@cache
def tile_linear() -> TileLinear | None:
    """The product on tiles; None if the machine has no kernels or no AMX."""
    if unavailable(PRODUCTS) or not has_tiles():
        return None
    return TileLinear(library(HERE / "linear.cpp"))
