"""The state of an optimizer as tensors by name, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from proxima.data import NotFiniteError, UserError


def state_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Its tensors, as `exp_avg/<parameter>` … On several ranks they are sharded, and each rank judges its own slices.

    Raises:
        NotFiniteError: one of them is not finite: its weights would never move again.
    """
    names = {id(p): name for name, p in parameters.items()}
    tensors = {
        f"{key}/{names[id(parameter)]}": value if isinstance(value, Tensor) else torch.tensor(value)
        for parameter, slots in optimizer.state.items()
        for key, value in slots.items()
    }
    for name, value in tensors.items():
        own: Any = value
        if not bool((own.to_local() if hasattr(own, "to_local") else own).sum().isfinite()):
            raise NotFiniteError(f"the optimizer state {name!r} is NaN, infinite or too large to add up")
    return tensors


def restore_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Copy what `state_tensors` gave into the optimizer.

    Raises:
        UserError: the tensors belong to another model, or some are missing.
    """
    if missing := _missing(optimizer, parameters, tensors):
        raise UserError(f"the optimizer state lacks {missing[0]!r} ({len(missing)} in all), which this model has")
    for name, value in tensors.items():
        key, _, owner = name.partition("/")
        place = _place(optimizer, key, parameters[owner], value) if owner in parameters else None
        if place is None or (value.dim() and value.shape != place[0]):
            raise UserError(
                f"the optimizer state holds {name!r} of shape {list(value.shape)}, which this model does not have"
            )
        optimizer.state[parameters[owner]][key] = value.to(place[1], copy=True)


def _missing(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> list[str]:
    """What should be there: nothing before the first update, else what the optimizer says, or what any weight has."""
    kinds = {name.partition("/")[0] for name in tensors}
    slots: Any = getattr(optimizer, "slots", None)
    trained = [(name, p) for name, p in parameters.items() if p.requires_grad]
    expected = {f"{kind}/{name}" for name, p in trained for kind in (slots(p) if slots and kinds else kinds)}
    return sorted(expected - tensors.keys())


def _place(
    optimizer: torch.optim.Optimizer, key: str, parameter: nn.Parameter, value: Tensor
) -> tuple[torch.Size, torch.device]:
    """The shape of an entry that is no scalar, and the device of any."""
    own: Any = getattr(optimizer, "place", None)  # of a `WeightwiseOptimizer`, which most runs need not import
    if own is not None:
        return own(key, parameter)  # type: ignore[no-any-return]
    fused = bool(optimizer.defaults.get("fused"))  # its step counts lie beside the weights, others on the CPU
    return parameter.shape, parameter.device if value.dim() or fused else torch.device("cpu")
