"""The state of an optimizer: read from a checkpoint, which any number of ranks wrote by slices, on any number of ranks;
and restored from tensors by name, which `TrainStack.state` returns."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from proxima.data import UserError
from proxima.model.parallel.sharded import fill_weight
from proxima.training.optimizer_step import sharded_as


def read_optimizer(place: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the folder `place`, or of the file of that name with `.safetensors`, by `kind/weight`. If the
    weight is sharded, so is its tensor, and a rank keeps only its own slice; every other tensor is read whole.

    Raises:
        OSError, SafetensorError: a file can't be read.
    """
    if place.is_dir():
        return read_slices(place, weights)
    tensors = dict[str, Tensor]()
    with safe_open(place.with_suffix(".safetensors"), framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            whole = opened.get_tensor(name)
            tensors[name] = _empty(name, whole.shape, whole.dtype, weights)
            fill_weight(tensors[name], whole)
    return tensors


def read_slices(folder: Path, weights: Mapping[str, Tensor], names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors of these names, None: all, in a folder that the ranks of torch.distributed.checkpoint wrote; as
    `read_optimizer`."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader, planner = HuggingFaceStorageReader(str(folder)), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    stored: dict[str, Any] = metadata.state_dict_metadata
    tensors = {
        name: _empty(name, stored[name].size, stored[name].properties.dtype, weights)
        for name in (stored if names is None else names)
    }
    planner.set_up_planner(tensors, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    return tensors


def _empty(name: str, size: torch.Size, dtype: torch.dtype, weights: Mapping[str, Any]) -> Tensor:
    """A tensor `kind/weight` to be filled; sharded like the weight if that is sharded and of the same shape except for
    the columns."""
    weight: Any = weights.get(name.partition("/")[2])
    if not (hasattr(weight, "to_local") and len(size) > 0 and weight.shape[:-1] == size[:-1]):
        return torch.empty(size, dtype=dtype)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local_shape, _ = compute_local_shape_and_global_offset(size, weight.device_mesh, weight.placements)
    return sharded_as(weight, torch.empty(local_shape, dtype=dtype, device=weight.to_local().device), size)


def restore_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Copy the tensors of `TrainStack.state` into the optimizer.

    Raises:
        UserError: the tensors belong to another model, or some are missing; 8-bit moments are in other blocks.
    """
    if missing := _missing(optimizer, parameters, tensors):
        _refuse_other_blocks(missing[0], tensors)
        raise UserError(f"the optimizer state lacks {missing[0]!r} ({len(missing)} in all), which this model has")
    for name, value in tensors.items():
        key, _, owner = name.partition("/")
        place = _place(optimizer, key, parameters[owner], value) if owner in parameters else None
        if place is None or (value.dim() and value.shape != place[0]):
            _refuse_other_blocks(name, tensors)
            raise UserError(
                f"the optimizer state holds {name!r} of shape {list(value.shape)}, which this model does not have"
            )
        optimizer.state[parameters[owner]][key] = value.to(place[1], copy=True)


def _refuse_other_blocks(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError if the misfit is a scale tensor of `optimizer_8bit`, a column per block, and there are others of
    its kind."""
    kind, _, owner = name.partition("/")
    if kind.endswith("_scale") and any(other.startswith(f"{kind}/") for other in tensors):
        reason = f"the 8-bit moments of {owner!r} are in other blocks than this run's: the checkpoint was written with"
        remedy = "resume with the tensor_parallel that it was written with"
        raise UserError(f"{reason} another placement.tensor_parallel, which cuts rows elsewhere", remedy=remedy)


def _missing(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> list[str]:
    """The missing tensors. Expected are none before the first update, else those that the optimizer names, or those
    that any weight has."""
    kinds = {name.partition("/")[0] for name in tensors}
    slots: Any = getattr(optimizer, "slots", None)
    trained = [(name, p) for name, p in parameters.items() if p.requires_grad]
    expected = {f"{kind}/{name}" for name, p in trained for kind in (slots(p) if slots and kinds else kinds)}
    return sorted(expected - tensors.keys())


def _place(
    optimizer: torch.optim.Optimizer, key: str, parameter: nn.Parameter, value: Tensor
) -> tuple[torch.Size, torch.device]:
    """The shape of an entry that is not a scalar, and the device of any entry."""
    place: Any = getattr(optimizer, "place", None)  # of a `WeightwiseOptimizer`, which most runs need not import
    if place is not None:
        return place(key, parameter)  # type: ignore[no-any-return]
    fused = bool(optimizer.defaults.get("fused"))  # its step counts are on the weights' device, others on the CPU
    return parameter.shape, parameter.device if value.dim() or fused else torch.device("cpu")
