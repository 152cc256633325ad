"""Muon for the matrices of the layers, AdamW for all other weights."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

from proxima.data import require
from proxima.model.parallel.gather import whole_tensor
from proxima.model.parallel.sharding import fill_weight, own_slice
from proxima.training.optimizer import ADAM, Adam, WeightwiseOptimizer, sharded_as

COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)


@dataclass(frozen=True)
class Muon(Adam):
    """Orthogonalized momentum for the matrices of the layers; AdamW, with beta1, beta2 and eps, for all other weights:
    embedding, output head, vectors, and experts, whose matrices are stacked.

        b ← momentum b + (1 - momentum) g      u = (1 - momentum) g + momentum b      u ≈ U S Vᵀ
        W ← (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) U Vᵀ

    The factor gives an update the root mean square of AdamW's, about 0.2, so that both share `lr`. U Vᵀ is computed by
    five Newton-Schulz steps in bfloat16 on whole matrices, some 30 rows² columns operations each (rows the smaller
    side): every rank gathers each matrix in turn and makes the same computation.

    Args:
        momentum: in [0, 1).
        adamw_lr: peak learning rate of the weights that AdamW updates, >= 0; None: `lr`.
    Source: arXiv 2502.16982, section 2.2; `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, nesterov.
    Differs: experts are not split into their matrices.
    Edge cases: nearly zero components of an update grow to the size of U Vᵀ, and their bfloat16 rounding with them.
        With the same gradients, every layout of ranks makes the same step; gradients that differ in the last bit may
        give clearly different steps.
    """

    momentum: float = 0.95
    adamw_lr: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum < 1, "momentum", self.momentum, "must be in [0, 1)")
        rate = self.adamw_lr
        require(rate is None or 0 <= rate < math.inf, "adamw_lr", rate, "must be >= 0 and finite")

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over parameters of layers only: Muon updates every matrix."""
        return self.build_named([(f"layers.{i}.", parameter) for i, parameter in enumerate(parameters)])

    def build_named(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer over the parameters of a model, in their order."""
        trained = [(name, p) for name, p in named if p.requires_grad]
        matrices = [p for name, p in trained if is_matrix_of_layer(name, p)]
        others = self.groups(p for name, p in trained if not is_matrix_of_layer(name, p))
        groups: list[dict[str, Any]] = []
        if matrices:
            groups.append({"params": matrices, "momentum": self.momentum, "weight_decay": self.weight_decay})
        lr = self.lr if self.adamw_lr is None else self.adamw_lr
        groups += [group | {"lr": lr} for group in others]
        return MuonAndAdamW(groups, self.settings())

    def moments(self, matrices: int, others: int) -> tuple[int, int]:
        return 4 * matrices, 8 * others


def is_matrix_of_layer(name: str, parameter: Tensor) -> bool:
    """True if Muon updates this parameter of a model: a matrix in a numbered module."""
    return parameter.dim() == 2 and re.search(r"\.\d+\.", f".{name}") is not None


class MuonAndAdamW(WeightwiseOptimizer):
    """Muon for the groups with a `momentum`, with `momentum_buffer` as state; fused AdamW for the others."""

    def __init__(self, groups: Iterable[dict[str, Any]], settings: dict[str, Any]) -> None:
        super().__init__(groups, {"momentum": None} | settings)
        self.matrices: set[int] = set()  # by their ids
        for group in self.param_groups:
            if group["momentum"] is not None:
                self.matrices.update(map(id, group["params"]))

    def slots(self, parameter: nn.Parameter) -> tuple[str, ...]:
        if id(parameter) in self.matrices:
            return ("momentum_buffer",)
        return ADAM

    def step_weight(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        if group["momentum"] is None:
            super().step_weight(parameter, group)
            return

        weight = own_slice(parameter)
        gradient = own_slice(parameter.grad)
        slots = self.state[parameter]
        if not slots:
            slots["momentum_buffer"] = self.zeros("momentum_buffer", parameter, gradient.dtype)
        buffer = own_slice(slots["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        rounded = gradient.lerp(buffer, group["momentum"]).bfloat16()  # as Newton-Schulz begins
        update = sharded_as(parameter, rounded, parameter.shape)
        fill_weight(update, _zeropower_via_newtonschulz(whole_tensor(update), COEFFICIENTS, DEFAULT_NS_STEPS, EPS))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(own_slice(update), alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))
