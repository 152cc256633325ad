"""Optimizers that step a weight at a time, on this rank's slice of it; their state is plain tensors, or tensors sharded
like the weight, so that any number of ranks can write and read it."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from proxima.model.parallel.sharded import own_slice

MOMENTS = ("exp_avg", "exp_avg_sq")
ADAM = ("step", *MOMENTS)


class WeightwiseOptimizer(torch.optim.Optimizer):
    """torch's fused AdamW, a weight at a time, bit-identical and with state of the same names; a subclass may implement
    another `step_weight`.

    Args:
        groups: as torch's optimizers take them.
        defaults: of a group's settings.
        on_host: the state is in host memory, pinned if the weights are on a GPU.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any], *, on_host: bool = False) -> None:
        super().__init__(groups, {"weight_decay": 0.0} | defaults)
        self.on_host = on_host

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_weight(parameter, group)

    def step_weight(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Update one weight from its gradient, on its device. Every rank calls it for the same weights in the same
        order."""
        weight, slots = own_slice(parameter), self.state[parameter]
        if not slots:
            slots["step"] = torch.zeros((), device=self.place("step", parameter)[1])
            slots.update({name: self.zeros(name, parameter, weight.dtype) for name in MOMENTS})
        kept = [own_slice(slots[name]) for name in ADAM]
        step, first, second = here = [tensor.to(weight.device) for tensor in kept]
        beta1, beta2 = group["betas"]
        adamw(
            [weight], [own_slice(parameter.grad)], [first], [second], [], [step],
            fused=True, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        for before, new in zip(kept, here, strict=True):
            if new is not before:
                before.copy_(new)

    def slots(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The state entries of a weight after its first step."""
        return ADAM

    def place(self, slot: str, parameter: nn.Parameter) -> tuple[torch.Size, torch.device]:
        """The shape of a state entry that is not a scalar, and the device of any entry."""
        return parameter.shape, torch.device("cpu") if self.on_host else parameter.device

    def zeros(self, slot: str, parameter: nn.Parameter, dtype: torch.dtype, columns: int = 1) -> Tensor:
        """A new state entry, with one element for every `columns` elements of a row of the weight."""
        shape, device = self.place(slot, parameter)
        shard = own_slice(parameter)
        sizes = shard.shape if columns == 1 else (*shard.shape[:-1], shard.shape[-1] // columns)
        zeros = torch.zeros(sizes, dtype=dtype, device=device, pin_memory=shard.is_cuda and device.type == "cpu")
        return sharded_as(parameter, zeros, shape)


def sharded_as(weight: Tensor, own: Tensor, shape: torch.Size) -> Tensor:
    """The tensor of `shape` whose slice on this rank is `own`, sharded like `weight`."""
    if not hasattr(weight, "to_local"):
        return own
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    like: Any = weight
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=TensorMeta(shape, strides, own.dtype))
    return DTensor(own, spec, requires_grad=False)
