"""Inspects modules and weights that may be split over many ranks. As light as `sharding`."""

from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(module: nn.Module) -> bool:
    """True for a module that `shard_model` or `shard_head` has sharded."""
    return hasattr(module, "set_requires_gradient_sync")


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was sharded."""
    kind: Any = type(module)
    return kind.__bases__[1] if is_sharded(module) else kind  # type: ignore[no-any-return]


def fill_weight(weight: Tensor, whole: Any) -> None:
    """Copy into a weight, plain or sharded, its part of `whole`, a tensor or a slice of a safetensors file."""
    local, offset = local_part(weight)
    if local.numel():
        index: Any = tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True)) or ...
        with torch.no_grad():
            local.copy_(whole[index])


def own_slice(tensor: Any) -> Tensor:
    """This rank's slice of a tensor; all of a plain one."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def local_part(weight: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a weight, and its offset in the whole."""
    if not hasattr(weight, "to_local"):
        return weight, (0,) * weight.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = weight
    _, offset = compute_local_shape_and_global_offset(weight.shape, sharded.device_mesh, sharded.placements)
    return sharded.to_local(), tuple(offset)
