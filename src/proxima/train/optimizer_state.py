"""Restores the state of an optimizer from tensors by name; `TrainStack.state` returns them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from proxima.data import UserError


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
