"""Computes in float32 with weights rounded to a server's dtype: this gives a server's log-probs without the rounding of
its activations.

Small updates are below the rounding of bfloat16, so the weights at a server move less than the trainer's, or not at
all. Whether a server follows is therefore judged by the rounded weights that it received.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from proxima.model.lora import base_layer, is_adapted, weight_of


@contextmanager
def rounded_to(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside this context a model's parts compute in float32 with weights rounded to `dtype` and adapters merged.
    Weights are replaced one layer at a time, so that memory holds one extra layer; afterwards all are restored exactly.
    """
    swaps = [_Swap(unit, dtype, whole) for unit, whole in _units(module)]
    hooks: list[Any] = []
    for swap in swaps:
        hooks.append(swap.unit.register_forward_pre_hook(swap.enter, with_kwargs=True))
        hooks.append(swap.unit.register_forward_hook(lambda *_, swap=swap: swap.leave()))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for swap in swaps:
            swap.leave()


def rounded_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight as a server of this dtype receives it, in float32; tensors that are not floating-point are unchanged."""
    return weight.detach().to(dtype).float() if weight.is_floating_point() else weight


def _units(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the layers of a stack and the modules outside it, each with a flag that says whether its submodules belong
    to it."""
    stacked = any(isinstance(part, nn.ModuleList) for part in module.modules())
    if isinstance(module, nn.ModuleList):
        for child in module:
            yield child, True
        return
    yield module, not stacked
    if stacked:
        for child in module.children():
            yield from _units(child)


def _as_float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


class _Swap:
    """The weights of one unit, replaced while it computes."""

    def __init__(self, unit: nn.Module, dtype: torch.dtype, whole: bool) -> None:
        self.unit, self.dtype, self.whole = unit, dtype, whole
        self._saved: list[tuple[nn.Parameter, Tensor]] = []
        self._adapted: list[Any] = []

    def enter(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """Replace the weights; what the unit is given, such as pixels in its weights' dtype, becomes float32."""
        below = list(self.unit.modules()) if self.whole else [self.unit]
        adapted = [layer for layer in below if is_adapted(layer)]
        merged = {id(base_layer(layer).weight): rounded_weight(weight_of(layer), self.dtype) for layer in adapted}
        for layer in adapted:
            layer.enable_adapters(False)  # type: ignore[operator]
        self._adapted = adapted
        for parameter in self.unit.parameters(recurse=self.whole):
            self._saved.append((parameter, parameter.data))
            parameter.data = merged.get(id(parameter), rounded_weight(parameter.data, self.dtype))
        return tuple(map(_as_float, given)), {name: _as_float(value) for name, value in named.items()}

    def leave(self) -> None:
        for parameter, values in self._saved:
            parameter.data = values
        for layer in self._adapted:
            layer.enable_adapters(True)
        self._saved, self._adapted = [], []
