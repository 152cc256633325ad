"""What a decode step does between its matrix products, as calls of `step.cpp`."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from proxima.kernels.compiled import PRODUCTS, library, unavailable


class StepKernels:
    """Functions over contiguous CPU tensors of n rows, bf16 unless said otherwise. They write `out` and return it.

    A row's bits depend on that row alone.

    Args:
        compiled: `step.cpp`, for this size of the heads.
    """

    def __init__(self, compiled: ctypes.CDLL) -> None:
        pointer, number, count, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
        self._norm, self._attend, self._swiglu = compiled.norm, compiled.attend, compiled.swiglu
        self._norm.argtypes = [*[pointer] * 3, real, pointer, number, number, count]
        self._attend.argtypes = [*[pointer] * 3, real, *[pointer] * 5, real, number, number, number, count]
        self._swiglu.argtypes = [pointer, pointer, number, number, count]

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """x [n, D] float32 += delta [n, D], in place; its RMS norm [n, D]. `weight` [D] float32."""
        added, threads = None if delta is None else delta.data_ptr(), torch.get_num_threads()
        self._norm(x.data_ptr(), added, weight.data_ptr(), eps, out.data_ptr(), *x.shape, threads)
        return out

    def attend(
        self,
        qkv: Tensor,
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        turns: Tensor,
        position: Tensor,
        layer: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Norm and turn queries and keys, write keys and values into the cache, and attend to it: [n, H * D].

        Args:
            qkv: [n, (H + 2 H_kv) * D], queries, keys, values.
            norms: [D] float32 of queries and keys, or None; `eps` is theirs.
            turns: [length, D / 2] complex64, the rotary embedding of each position; pairs are neighbours.
            position: [n] int64, of each row's token.
            layer: [2, slots, H_kv, capacity, D] of `KVCache`; row r is slot r.
        """
        query_norm, key_norm = (None if norm is None else norm.data_ptr() for norm in norms)
        keys, values = layer
        _, kv_heads, capacity, dim = keys.shape
        pointers = turns, position, keys, values, out
        sizes = len(qkv), kv_heads, capacity, torch.get_num_threads()
        self._attend(
            qkv.data_ptr(), query_norm, key_norm, eps, *(tensor.data_ptr() for tensor in pointers), dim**-0.5, *sizes
        )
        return out

    def swiglu(self, gate_up: Tensor, out: Tensor) -> Tensor:
        """silu(gate) * up [n, F] of [n, 2 F]."""
        self._swiglu(gate_up.data_ptr(), out.data_ptr(), *out.shape, torch.get_num_threads())
        return out


@cache
def step_kernels(head_dim: int, group: int) -> StepKernels | None:
    """For heads of `head_dim` and `group` query heads a key head; None where the machine has no kernels.
    Sizes are multiples of 32."""
    if unavailable(PRODUCTS):
        return None
    return StepKernels(library(Path(__file__).with_suffix(".cpp"), f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}"))
