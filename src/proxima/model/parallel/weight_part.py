"""A rank's part of a weight, and its place in the whole."""

from typing import Any

import torch
from torch import Tensor


def fill_weight(weight: Tensor, whole: Any) -> None:
    """Copy into a weight, plain or sharded, its part of `whole`, a tensor or a slice of a safetensors file."""
    local, offset = local_part(weight)
    if local.numel():
        index: Any = tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True)) or ...
        with torch.no_grad():
            local.copy_(whole[index])


def local_part(weight: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a weight, and its offset in the whole."""
    if not hasattr(weight, "to_local"):
        return weight, (0,) * weight.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = weight
    _, offset = compute_local_shape_and_global_offset(weight.shape, sharded.device_mesh, sharded.placements)
    return sharded.to_local(), tuple(offset)
