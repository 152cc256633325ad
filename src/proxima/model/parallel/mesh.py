"""The device mesh of a run's ranks, made once a process."""

import os
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from proxima.data import FieldError
from proxima.model.parallel.sharding import Sharding


def rank_device(device: str = "auto") -> torch.device:
    """Where this rank computes: cuda:LOCAL_RANK for any CUDA device, and for `auto` if there is one, else the CPU."""
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu" if device == "auto" else device)


def mesh_of(sharding: Sharding, device: torch.device) -> DeviceMesh:
    """The mesh that `sharding` asks for: (ranks,), or (copies, ranks of a copy). Collective at the first call.

    Raises:
        FieldError: the number of ranks is no multiple of `ranks_per_node`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # FSDP computes on the current one
    world, inner = dist.get_world_size(), 1
    if sharding.kind == "hybrid":
        inner = sharding.ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        if world % inner:
            remedy = "start as many ranks on every node, or use kind=full"
            raise FieldError("ranks_per_node", inner, f"must divide the number of ranks, {world}", remedy=remedy)
    return _mesh(None if sharding.kind == "full" else inner, device.type, dist.group.WORLD)


@lru_cache(maxsize=8)
def _mesh(inner: int | None, kind: str, group: Any) -> DeviceMesh:
    world = dist.get_world_size(group)
    if inner is None:
        return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (world // inner, inner), mesh_dim_names=("replicate", "shard"))
