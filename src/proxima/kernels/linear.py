"""Linear layers in bf16 on the tiles of AMX, by `linear.cpp`."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from proxima.kernels.compiled import PRODUCTS, functions, has_tiles, library, unavailable

Rows = tuple[Tensor, Tensor | None]  # a weight [o, in], and the order [o] int64 of its rows; None: unchanged
SIDE, DEPTH = 16, 32  # outputs per tile, inputs per product


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
            parts = [(torch.cat([weight if order is None else weight[order] for weight, order in parts]), None)]
        height, width = sum(len(weight) for weight, _ in parts), parts[0][0].shape[1]
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
        out = x.new_empty(len(x), weight.shape[0] * 2 * SIDE) if out is None else out
        self._calls["linear"](x, weight, bias, out, *x.shape, out.shape[1])
        return out


@cache
def tile_linear() -> TileLinear | None:
    """The product on tiles; None if the machine has no kernels or no AMX."""
    if unavailable(PRODUCTS) or not has_tiles():
        return None
    return TileLinear(library(Path(__file__).with_suffix(".cpp")))
