"""Whole weights of a sharded model, one at a time; a plain model that holds them; norms over weights or gradients that
are split over ranks.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from proxima.model.architecture import ADAPTER
from proxima.model.input_files import ATTRIBUTE, input_files_of
from proxima.model.parallel.sharding import own_slice, plain_type
from proxima.model.parallel.slices import unloaded_model
from proxima.model.pretrained import LoadedModel

# the second is its name before torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SMALL = 16 << 20  # bytes of a tensor up to which it is gathered with others, and copied once more


def whole_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The whole tensor, on every rank; collective for a sharded one.

    Args:
        dtype: to which a floating-point tensor is rounded before it is gathered; None: its own.
    """
    rounded = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        rounded = rounded.to(dtype)
    if not isinstance(tensor, DTensor):
        return rounded
    sharded: Any = rounded
    mesh = tensor.device_mesh
    local = sharded.to_local()
    if local.device.type != mesh.device_type:  # offloaded
        sharded = DTensor.from_local(
            local.to(mesh.device_type),
            mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    placements = list(tensor.placements)
    for axis in range(mesh.ndim):  # torch warns where one call needs several collectives, as it does for experts
        placements[axis] = Replicate()
        sharded = sharded.redistribute(placements=placements)
    whole: Tensor = sharded.to_local()
    return whole


@torch.no_grad()
def whole_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`whole_tensor` of each, with fewer calls: what FSDP splits, by rows over the ranks of one axis, is gathered
    without DTensor's own steps, which take a millisecond of the host, and small tensors in one collective. Bit-equal.
    """
    whole = dict[str, Tensor]()
    together = dict[Any, list[str]]()
    for name, tensor in tensors.items():
        axis = _axis_of_rows(tensor)
        if axis is None or not isinstance(tensor, DTensor):
            whole[name] = whole_tensor(tensor, dtype)
            continue
        sent = tensor.dtype
        if dtype is not None and tensor.is_floating_point():
            sent = dtype
        small = tensor.numel() * sent.itemsize <= SMALL
        alone = "" if small else name
        together.setdefault((tensor.device_mesh, axis, sent, alone), []).append(name)
    for (mesh, axis, sent, _), names in together.items():
        whole |= _gathered_rows({name: tensors[name] for name in names}, mesh, axis, sent)
    return {name: whole[name] for name in tensors}


def _axis_of_rows(tensor: Tensor) -> int | None:
    """The axis of the ranks' mesh whose ranks each have some rows of a tensor, where it is split in no other way."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    split = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(split) != 1 or mesh.size(split[0]) == 1:
        return None
    placement = tensor.placements[split[0]]
    if type(placement) is not Shard or placement.dim != 0:
        return None
    return split[0]


def _gathered_rows(tensors: Mapping[str, Tensor], mesh: Any, axis: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole tensors from the rows of the ranks of an axis, in one collective. Each rank sends as many rows of a tensor
    as the first one has; those that it lacks are the last ones, and are dropped."""
    size = mesh.size(axis)
    parts = list[tuple[str, int, int]]()
    total = 0
    for name, tensor in tensors.items():
        rows = -(-tensor.shape[0] // size)
        count = rows * tensor.shape[1:].numel()
        parts.append((name, total, count))
        total += count
    sent = torch.empty(total, dtype=dtype, device=mesh.device_type)
    for name, start, _ in parts:
        own = own_slice(tensors[name].detach())
        sent[start : start + own.numel()].copy_(own.reshape(-1), non_blocking=True)
    received = sent.new_empty(size * total)
    _all_gather(received, sent, group=mesh.get_group(axis))
    received = received.view(size, total)
    whole = dict[str, Tensor]()
    for name, start, count in parts:
        shape = tensors[name].shape
        rows_of_all = received[:, start : start + count].reshape(-1, *shape[1:])  # of one tensor alone: no copy
        whole[name] = rows_of_all[: shape[0]]
    return whole


@torch.no_grad()
def gather_into(model: nn.Module, plain: nn.Module | None) -> None:
    """Copy the weights of a sharded model into `plain`, of the same architecture, on each rank that passes one (None
    elsewhere). Collective; bit-equal."""
    targets = {} if plain is None else dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        whole = whole_tensor(parameter)
        if plain is not None:
            targets[name].copy_(whole)


def plain_copy(loaded: LoadedModel, device: str | torch.device = "cpu") -> LoadedModel | None:
    """A plain model with the weights and adapters of a sharded one on rank 0, None on every other. Collective."""
    model: Any = loaded.model
    plain = None
    if dist.get_rank() == 0:
        plain = empty_like(model, torch.device(device))
    gather_into(model, plain)
    if plain is None:
        return None
    return replace(loaded, model=plain.eval(), sharding=None, device=None)


def empty_like(model: Any, device: torch.device, *, weights: bool = True) -> Any:
    """A plain model of the same architecture and adapters as a sharded one, whose weights are yet to be filled in.

    Args:
        weights: allocate memory for them; False: they have a shape and can't be filled.
    """
    kind = plain_type(model)
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa" if model._supports_sdpa else None
    plain: Any = unloaded_model(lambda: kind(config))
    adapters = getattr(model, "peft_config", None)
    if adapters:
        from peft import inject_adapter_in_model

        inject_adapter_in_model(copy.deepcopy(adapters[ADAPTER]), plain, ADAPTER)
    parameters = dict[int, nn.Parameter]()  # by the sharded one: tied ones stay so
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in parameters:
            shape = parameter.shape if weights else ()
            empty = torch.empty(shape, dtype=parameter.dtype, device=device)
            if not weights:
                empty = empty.expand(parameter.shape)
            parameters[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        owner, _, last = name.rpartition(".")
        setattr(plain.get_submodule(owner), last, parameters[id(parameter)])
    setattr(plain, ATTRIBUTE, input_files_of(model))
    conversions = getattr(model, "_weight_conversions", None)  # to the names of the files, in `save`
    if conversions is not None:
        plain._weight_conversions = conversions
    sources = dict(model.named_buffers())
    for name, _ in list(plain.named_buffers()):
        owner, _, last = name.rpartition(".")
        plain.get_submodule(owner)._buffers[last] = sources[name].detach().to(device, copy=True)
    plain.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    return plain


@torch.no_grad()
def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all tensors as one vector, a plain float64 scalar on the device of the ranks' mesh, the same on
    every rank. Collective; each mesh is summed separately, and a plain tensor counts once.

    Edge cases: no tensors: 0. NaN and infinity of any rank reach all.
    """
    parts: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        key = None
        if isinstance(tensor, DTensor):
            key = (tensor.device_mesh, tensor.placements)
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
    if total is None:
        return torch.zeros((), dtype=torch.float64)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], bound: float, norm: Tensor) -> None:
    """Scale the gradients in place so that their norm, of `total_norm`, is at most `bound`; no collective. The factor
    is that of `torch.nn.utils.clip_grads_with_norm_`, in float32."""
    factor = (bound / (norm.float() + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local = own_slice(parameter.grad)
            local.mul_(factor.to(local.device))
