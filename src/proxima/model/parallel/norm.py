"""Norms over weights or gradients that are split over ranks."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from proxima.model.parallel.sharded import own_slice


@torch.no_grad()
def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all tensors as one vector, a plain float64 scalar on the device of the ranks' mesh, the same on
    every rank. Collective; each mesh is summed separately, and a plain tensor counts once.

    Edge cases: no tensors: 0. NaN and infinity of any rank reach all.
    """
    parts: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        key = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        local = own_slice(tensor)
        dtype = torch.promote_types(local.dtype, torch.float32)
        parts.setdefault(key, []).append(torch.linalg.vector_norm(local, dtype=dtype).double().square())
    total: Tensor | None = None
    for key, squares in parts.items():
        part = torch.stack(squares).sum()
        if key is not None:
            mesh, placements = key
            part = part.to(mesh.device_type)
            for axis, placement in enumerate(placements):
                if not placement.is_replicate():  # also what is split twice along an axis
                    dist.all_reduce(part, group=mesh.get_group(axis))
        total = part if total is None else total.to(part.device) + part
    return torch.zeros((), dtype=torch.float64) if total is None else total.sqrt()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], bound: float, norm: Tensor) -> None:
    """Scale the gradients in place so that their norm, of `total_norm`, is at most `bound`; no collective. The factor
    is that of `torch.nn.utils.clip_grads_with_norm_`, in float32."""
    factor = (bound / (norm.float() + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local = own_slice(parameter.grad)
            local.mul_(factor.to(local.device))
