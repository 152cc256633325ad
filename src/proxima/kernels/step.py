"""The operations of a decode step between its matrix products, as calls of `step.cpp`."""

import ctypes
from functools import cache
from pathlib import Path

from torch import Tensor

from proxima.kernels.compiled import PRODUCTS, functions, library, unavailable

ARGUMENTS = {"norm": "pppfpnn", "attend": "pppfpppppppfnnn", "swiglu": "ppnn"}


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
    return StepKernels(library(Path(__file__).with_suffix(".cpp"), f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}"))
