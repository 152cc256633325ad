"""Muon for the matrices of the layers, AdamW for all other weights."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

from proxima.data import require
from proxima.train.optimizer import Adam, by_mesh
from proxima.train.optimizer_step import ADAM, WeightwiseOptimizer, own_slice

GATHERED = torch.bfloat16  # of a whole update: Newton-Schulz begins by rounding it so
COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)


@dataclass(frozen=True)
class Muon(Adam):
    """Momentum, orthogonalized, for the matrices of the layers; AdamW, by beta1, beta2 and eps, for all other weights:
    embedding, output head, vectors, and experts, whose matrices are stacked.

        b ← momentum b + (1 - momentum) g      u = (1 - momentum) g + momentum b      u ≈ U S Vᵀ
        W ← (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) U Vᵀ

    The factor gives the update of a weight the root mean square of AdamW's, about 0.2, so that both share `lr`. U Vᵀ is
    five Newton-Schulz steps in bfloat16. It takes whole matrices, some 30 rows² columns operations each (rows the
    smaller side): n ranks gather n matrices, compute one each, and send the others their slices.

    Args:
        momentum: in [0, 1).
        adamw_lr: peak learning rate of the weights that AdamW updates, >= 0; None: `lr`.
    Source: arXiv 2502.16982, section 2.2; `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, nesterov.
    Differs: experts are not split into their matrices.
    Edge cases: nearly zero components of an update grow to the size of U Vᵀ, and bfloat16's rounding with them: with
    the same gradients every layout of ranks makes the same step, but gradients that differ in their last bit do not.
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
        rest = {"lr": self.lr if self.adamw_lr is None else self.adamw_lr}
        first = [{"params": matrices, "momentum": self.momentum, "weight_decay": self.weight_decay}] if matrices else []
        return MuonAndAdamW([*first, *(group | rest for group in others)], self.settings())

    def moments(self, matrices: int, others: int) -> tuple[int, int]:
        return 4 * matrices, 8 * others


def is_matrix_of_layer(name: str, parameter: Tensor) -> bool:
    """True if Muon updates this parameter of a model: a matrix in a numbered module."""
    return parameter.dim() == 2 and re.search(r"\.\d+\.", f".{name}") is not None


class MuonAndAdamW(WeightwiseOptimizer):
    """Muon for the groups with a `momentum`, with `momentum_buffer` as state; fused AdamW for the others."""

    def __init__(self, groups: Iterable[dict[str, Any]], settings: dict[str, Any]) -> None:
        super().__init__(groups, {"momentum": None} | settings)
        muon = (group["params"] for group in self.param_groups if group["momentum"] is not None)
        self.matrices = {id(parameter) for parameters in muon for parameter in parameters}

    def slots(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return ("momentum_buffer",) if id(parameter) in self.matrices else ADAM

    def step_group(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if group["momentum"] is None:
            super().step_group(parameters, group)
            return
        parameters = sorted(parameters, key=Tensor.numel)  # ranks that wait for each other have similar amounts of work
        for alike in by_mesh([{"params": parameters}]):
            matrices = alike["params"]
            mesh = getattr(matrices[0], "device_mesh", None)
            count = 1 if mesh is None else mesh.size()
            for start in range(0, len(matrices), count):
                self._step_matrices(matrices[start : start + count], group)

    def _step_matrices(self, matrices: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        updates = []
        for parameter in matrices:
            slots, gradient = self.state[parameter], own_slice(parameter.grad)
            if not slots:
                slots["momentum_buffer"] = self.zeros("momentum_buffer", parameter, gradient.dtype)
            buffer = own_slice(slots["momentum_buffer"])
            buffer.lerp_(gradient, 1 - group["momentum"])
            updates.append(gradient.lerp(buffer, group["momentum"]))
        for parameter, update in zip(matrices, _orthogonalized(matrices, updates), strict=True):
            weight = own_slice(parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def _orthogonalized(matrices: Sequence[Tensor], updates: Sequence[Tensor]) -> Iterator[Tensor]:
    """This rank's slices of U Vᵀ of the whole updates, from its slices `updates`. If they are sharded, at most as many
    as the ranks of their mesh, each rank computes one; collective."""
    if not hasattr(matrices[0], "to_local"):
        yield from map(_newton_schulz, updates)
        return
    from torch.distributed.tensor import DTensor, Replicate

    from proxima.model.parallel.gather import whole_tensor
    from proxima.train.optimizer_step import sharded_as

    first: Any = matrices[0]
    mesh, matrix = first.device_mesh, None
    here = tuple(mesh.get_coordinate())
    owners = list(product(*map(range, mesh.shape)))[: len(matrices)]
    for parameter, update, owner in zip(matrices, updates, owners, strict=True):
        whole = whole_tensor(sharded_as(parameter, update.to(GATHERED), parameter.shape))
        matrix = whole if owner == here else matrix
    matrix = None if matrix is None else _newton_schulz(matrix).contiguous()
    for parameter, update, owner in zip(matrices, updates, owners, strict=True):
        empty = torch.empty(parameter.shape, dtype=GATHERED, device=mesh.device_type)
        whole = matrix if matrix is not None and owner == here else empty
        for axis, place in enumerate(owner):  # ranks not yet in line with the owner broadcast unused data
            dist.broadcast(whole, group=mesh.get_group(axis), group_src=place)
        copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        sharded: Any = parameter
        yield own_slice(copies.redistribute(mesh, sharded.placements)).to(update.device)


def _newton_schulz(update: Tensor) -> Tensor:
    return _zeropower_via_newtonschulz(update, COEFFICIENTS, DEFAULT_NS_STEPS, EPS)
