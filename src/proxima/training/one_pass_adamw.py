"""AdamW on a CPU, with clipping and the norms of the weights in a single pass over memory."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from proxima.kernels.adamw import AdamWKernels, Slots, adamw_kernels


class OnePassAdamW:
    """Steps in place of torch's fused AdamW, on its state, and bit-identically. The norm of the gradient agrees with
    float64 to 1e-8; torch's sums in float32 are off by 3e-4 for 135 million weights, and so are its clipped gradients.

    Args:
        optimizer: its weights must be contiguous float32 tensors on the CPU.
    """

    def __init__(self, optimizer: torch.optim.AdamW, kernels: AdamWKernels) -> None:
        self.optimizer, self.kernels = optimizer, kernels
        self.weight_norms = (0.0, 0.0)  # before and after the last step

    def gradient_norm(self) -> Tensor:
        """[] float32, of all gradients; every weight has one."""
        return torch.tensor(self.kernels.gradient_norm([self._slots(p) for p in self._parameters()]))

    @torch.no_grad()
    def step(self, most: float, norm: Tensor) -> None:
        """Step on the gradients, of norm `norm`, clipped to `most`; 0: not clipped."""
        factor = float((most / (norm + 1e-6)).clamp(max=1.0)) if most > 0 else 1.0  # as torch clips
        torch._foreach_add_([self._state(p)["step"] for p in self._parameters()], 1)
        squares = []
        for group in self.optimizer.param_groups:
            settings = {name: group[name] for name in ("lr", "eps", "weight_decay")}
            settings["beta1"], settings["beta2"] = group["betas"]
            squares.append(self.kernels.step([self._slots(p) for p in group["params"]], factor, **settings))
        before, after = (math.sqrt(sum(totals)) for totals in zip(*squares, strict=True))
        self.weight_norms = before, after

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The state of torch's AdamW for a weight."""
        state: dict[str, Any] = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return state

    def _slots(self, parameter: nn.Parameter) -> Slots:
        assert parameter.grad is not None
        state = self._state(parameter)
        parameter.grad = parameter.grad.contiguous()
        return parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], float(state["step"])


def one_pass(optimizer: torch.optim.Optimizer) -> OnePassAdamW | None:
    """The one-pass step for an optimizer; None where the optimizer, its weights or the machine do not allow it."""
    if type(optimizer) is not torch.optim.AdamW or (kernels := adamw_kernels()) is None:
        return None
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    fine = all(type(p) is nn.Parameter and p.dtype == torch.float32 and p.is_contiguous() for p in weights)
    return OnePassAdamW(optimizer, kernels) if fine else None
