"""Linear layers in bf16 on the tiles of AMX, by `linear.cpp`."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from proxima.kernels.compiled import PRODUCTS, functions, has_tiles, library, unavailable

SIDE, DEPTH = 16, 32  # outputs of a tile, inputs of one product


class TileLinear:
    """x [n, in] bf16 times a packed weight [out, in], both sizes multiples of 32; a row's bits depend on it alone.

    Args:
        compiled: `linear.cpp`.
    """

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._linear = functions(compiled, {"linear": "ppppnnn"})["linear"]

    @staticmethod
    def pack(weight: Tensor) -> Tensor:
        """[out / 32, in / 32, 2, 16, 16, 2] of [out, in]: two tiles of 16 outputs at a time, inputs in pairs."""
        height, width = weight.shape
        pairs = weight.contiguous().view(torch.int32)  # moved as one number: twice as fast
        tiles = pairs.view(height // (2 * SIDE), 2, SIDE, width // DEPTH, DEPTH // 2).permute(0, 3, 1, 4, 2)
        packed: Tensor = tiles.contiguous().view(torch.bfloat16).unflatten(-1, (SIDE, 2))
        return packed

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """[n, out] bf16 of `pack(weight)` and bias [out] float32; written to `out`, where that is given."""
        x = x.contiguous()
        out = x.new_empty(len(x), weight.shape[0] * 2 * SIDE) if out is None else out
        self._linear(x, weight, bias, out, *x.shape, out.shape[1])
        return out


@cache
def tile_linear() -> TileLinear | None:
    """None where the machine has no kernels, or no AMX."""
    if unavailable(PRODUCTS) or not has_tiles():
        return None
    return TileLinear(library(Path(__file__).with_suffix(".cpp")))
