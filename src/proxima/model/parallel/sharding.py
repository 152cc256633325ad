"""The settings for splitting a model over ranks, and modules and weights that may be split. Light: importing this
module does not import torch.distributed.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from proxima.data import require
from proxima.data.field_checks import check_choices


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The layout of weights, gradients and optimizer state on the ranks of a run.

    `full` splits them over all ranks. `hybrid` splits them over the LOCAL_WORLD_SIZE ranks of a node, and each node has
    a copy. `replicate` gives every rank a whole copy: for small models and adapters. Gradients are sums over all ranks
    in each.

    `sum_gradients` is `micro_batch` by default, because only then the gradients are split too: whole on every rank they
    take 4 bytes per weight, 122 GiB for 32B. It costs little: a micro-batch that gathers each layer twice sends half as
    much again. Between the copies of `hybrid`, and in `replicate`, gradients are summed once per update in any case.
    """

    kind: Annotated[Literal["full", "hybrid", "replicate"], "what is split, and over which ranks"] = "full"
    param_dtype: Annotated[
        Literal["bfloat16"] | None,
        "of gathered weights; None: their own, and autocast rounds them, into copies that the backward pass keeps",
    ] = None
    reshard_after_forward: Annotated[bool, "gather again in the backward pass instead of keeping whole layers"] = True
    offload: Annotated[bool, "weights, gradients and optimizer state wait in host memory"] = False
    sum_gradients: Annotated[
        Literal["micro_batch", "update"], "when the ranks that share a copy add up their gradients"
    ] = "micro_batch"
    tensor_parallel: Annotated[int, "neighbouring ranks that split each layer's matrices, and the vocabulary"] = 1
    context_parallel: Annotated[int, "ranks that split the tokens of a micro-batch between them"] = 1
    expert_parallel: Annotated[int, "ranks that split the experts of a mixture, and send each other its tokens"] = 1

    def __post_init__(self) -> None:
        check_choices(self)
        require(self.param_dtype in (None, "bfloat16"), "param_dtype", self.param_dtype, "must be bfloat16 or null")

    @classmethod
    def of(cls, placement: Any) -> "Sharding":
        """The sharding of a placement in several processes."""
        spec = placement.sharding
        return cls(
            kind=spec.kind,
            param_dtype=spec.param_dtype,
            reshard_after_forward=spec.reshard_after_forward,
            offload=spec.offload,
            sum_gradients=spec.sum_gradients,
            tensor_parallel=placement.tensor_parallel,
            context_parallel=placement.context_parallel,
            expert_parallel=placement.expert_parallel,
        )

    @property
    def ranks_per_share(self) -> int:
        """Neighbouring ranks that compute the same sequences: one share of an update."""
        return self.tensor_parallel * self.context_parallel

    @property
    def splits_gradients(self) -> bool:
        """True if a rank holds only its part of the gradients between the micro-batches of an update."""
        return self.sum_gradients == "micro_batch" and self.kind != "replicate"

    @property
    def gathered_dtype(self) -> torch.dtype | None:
        """The dtype of the weights that a layer computes with; None: their own."""
        return torch.bfloat16 if self.param_dtype == "bfloat16" else None


def ranks_for_tensors(layout: Any, ranks: int) -> int:
    """The number that `tensor_parallel` must divide so that the other groups of a layout divide the remaining ranks; if
    they can't, the number of ranks. 0 ranks means unknown, and any number divides it."""
    others = math.lcm(layout.context_parallel, layout.expert_parallel)
    return ranks if ranks % others else ranks // others


def is_sharded(module: nn.Module) -> bool:
    """True for a module that `shard_model` or `shard_head` has sharded."""
    return hasattr(module, "set_requires_gradient_sync")


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was sharded."""
    kind = type(module)
    if is_sharded(module):
        plain: type[nn.Module] = kind.__bases__[1]
        return plain
    return kind


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


def copies(tensor: Any, ranks: int) -> int:
    """How many of the ranks have the same slice of a tensor."""
    if not hasattr(tensor, "to_local"):
        return ranks
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return ranks // math.prod(int(size) for size, placement in sizes if not placement.is_replicate())
