"""The device meshes of a run's ranks, created once per process.

Ranks are laid out as (copies, shards, tensor), the last varying fastest, so that the ranks which communicate most are
neighbours. A context group is part of the shards: its ranks hold different weights and compute the same sequences. So
is the group that splits the experts, whose ranks compute different sequences.

    8 ranks, tensor_parallel=2, context_parallel=2:    copies 1 × shards 4 × tensor 2
        rank              0 1   2 3   4 5   6 7
        sequences         a a   a a   b b   b b        two shares of an update
        tokens of them    1 1   2 2   1 1   2 2
        columns of matrices  1 2   1 2   1 2   1 2
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from proxima.data import FieldError, require
from proxima.model.parallel.sharding import Sharding


@dataclass(frozen=True)
class Meshes:
    """The ranks grouped by what they share; None where a dimension has one rank.

    Args:
        shards: (shards,) or (copies, shards): weights are split over the last, gradients summed over both.
        tensor, context: (ranks,), those that compute the same sequences.
        expert: (ranks,), which split the experts among them.
        expert_shards: as `shards`, over the ranks that have the same experts.
    """

    shards: DeviceMesh
    tensor: DeviceMesh | None = None
    context: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    expert_shards: DeviceMesh | None = None


def rank_device(device: str = "auto") -> torch.device:
    """The device of this rank: cuda:LOCAL_RANK for any CUDA device, and for `auto` if there is one, else the CPU."""
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device == "auto":
        return torch.device("cpu")
    return torch.device(device)


def meshes_of(sharding: Sharding, device: torch.device) -> Meshes:
    """The meshes that `sharding` asks for. Collective at the first call.

    Raises:
        FieldError: the number of ranks does not allow this layout.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # FSDP computes on the current one
    world = dist.get_world_size()
    copy = 0
    if sharding.kind == "hybrid":
        copy = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        bound = f"must divide the number of ranks, {world}"
        remedy = "start as many ranks on every node, or use kind=full"
        require(world % copy == 0, "LOCAL_WORLD_SIZE", copy, bound, remedy=remedy)
    elif sharding.kind == "replicate":
        copy = sharding.tensor_parallel
    for name, needed in (("tensor_parallel", sharding.tensor_parallel), ("context_parallel", sharding.ranks_per_share)):
        if world % needed or (sharding.kind == "hybrid" and copy % needed):
            by_node = copy and copy % sharding.ranks_per_share == 0
            within = f"the {copy} ranks of a node" if by_node else f"the {world} ranks"
            bound = f"must, with tensor_parallel={sharding.tensor_parallel}, divide {within}"
            raise FieldError(name, getattr(sharding, name), bound)
    shards = (copy or world) // sharding.tensor_parallel
    bound = f"must divide the {shards} ranks that split the weights of a copy"
    experts = sharding.expert_parallel
    require(shards % experts == 0, "expert_parallel", experts, bound)
    return _meshes(sharding, copy, device.type, dist.group.WORLD)


@lru_cache(maxsize=8)
def _meshes(sharding: Sharding, copy: int, kind: str, group: Any) -> Meshes:
    """`copy`: the number of ranks of one copy of the weights; 0: all ranks, without a dimension of copies."""
    world = dist.get_world_size(group)
    tensor = sharding.tensor_parallel
    shards = (copy or world) // tensor

    def laid_out(**sizes: int) -> Any:
        kept = {name: size for name, size in sizes.items() if size > 0}
        return init_device_mesh(kind, tuple(kept.values()), mesh_dim_names=tuple(kept))

    # 0: without such a dimension
    copies = world // copy if copy else 0
    split = tensor if tensor > 1 else 0
    axes = ("replicate", "shard") if copy else ("shard",)
    mesh = laid_out(replicate=copies, shard=shards, tensor=split)
    weights = mesh[axes] if split else mesh
    of_tensors = mesh["tensor"] if split else None
    context = None
    expert = None
    expert_shards = None
    if sharding.context_parallel > 1:
        parts = sharding.context_parallel
        context = laid_out(share=world // (parts * tensor), context=parts, tensor=tensor)["context"]
    if sharding.expert_parallel > 1:
        count = sharding.expert_parallel
        parts = laid_out(replicate=copies, shard=shards // count, expert=count, tensor=split)
        expert = parts["expert"]
        expert_shards = parts[axes]
    return Meshes(weights, of_tensors, context, expert, expert_shards)


class _Exchange(torch.autograd.Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch gives it no type

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.settings = sent, received, group
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradients[0], *ctx.settings), None, None, None


def exchange(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    """Send `rows` [Σ sent, …] to the ranks of the group, `sent` rows to each, and return [Σ received, …], `received`
    rows from each, in the order of the ranks. Counts may differ, and be 0. Collective, and so is its backward pass."""
    return _Exchange.apply(rows, received, sent, group)


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class _AddParts(torch.autograd.Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch gives it no type

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def add_parts(part: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of a group, all of which then compute the same from it: the gradient of a part is that of
    the sum, counted once. Collective; its backward pass is not."""
    return _AddParts.apply(part, group)
