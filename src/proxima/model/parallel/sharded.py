"""Inspects modules and weights that may be split over many ranks. As light as `sharding`."""

from typing import Any

from torch import Tensor, nn


def is_sharded(module: nn.Module) -> bool:
    """True for a module that `shard_model` or `shard_head` has sharded."""
    return hasattr(module, "set_requires_gradient_sync")


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was sharded."""
    kind: Any = type(module)
    return kind.__bases__[1] if is_sharded(module) else kind  # type: ignore[no-any-return]


def own_slice(tensor: Any) -> Tensor:
    """This rank's slice of a tensor; all of a plain one."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
