"""Optimizers and learning-rate schedules: their settings, how they step, and how their state is restored.

AdamW is torch's fused step over all weights, or weight by weight (`WeightwiseOptimizer`), or `OnePassAdamW`, which also
clips and measures in the same pass over memory; `optimizer_8bit` and `optimizer_muon` are the other kinds.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from proxima.data import UserError, require
from proxima.kernels.adamw import AdamWKernels, Slots, adamw_kernels
from proxima.model.parallel.sharding import own_slice


@dataclass(frozen=True)
class Adam:
    """The base of all kinds of Adam; vectors (norms, biases) are not decayed.

    Args:
        lr: peak learning rate, >= 0; 0 leaves the weights unchanged, to measure only the mismatch. The default is 2e-5
            in a recipe of SFT, 1e-5 in one of a reward model.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment, > 0.
        weight_decay: >= 0; each update subtracts this share, times the learning rate, from a weight.

    Source: arXiv 1711.05101.
    """

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.lr < math.inf, "lr", self.lr, "must be >= 0 and finite")
        require(0 <= self.beta1 < 1, "beta1", self.beta1, "must be in [0, 1)")
        require(0 <= self.beta2 < 1, "beta2", self.beta2, "must be in [0, 1)")
        require(0 < self.eps < math.inf, "eps", self.eps, "must be > 0 and finite")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "must be >= 0 and finite")

    def groups(self, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """Parameter groups for torch's optimizers: matrices before vectors, with a group for each device mesh, as a
        fused step needs."""
        split = dict[tuple[bool, Any], list[nn.Parameter]]()
        for parameter in parameters:
            if parameter.requires_grad:
                vector, mesh = parameter.dim() < 2, getattr(parameter, "device_mesh", None)
                split.setdefault((vector, mesh), []).append(parameter)
        groups = sorted(split.items(), key=lambda group: group[0][0])
        return [
            {"params": members, "weight_decay": 0.0 if vector else self.weight_decay} for (vector, _), members in groups
        ]

    def moments(self, matrices: int, others: int) -> tuple[int, int]:
        """Bytes of Muon's momentum, and of Adam's moments, for these numbers of weights: in the layers' matrices, and
        all others."""
        return 0, 8 * (matrices + others)

    def settings(self) -> dict[str, Any]:
        """Arguments of torch's AdamW and similar optimizers."""
        return {"lr": self.lr, "betas": (self.beta1, self.beta2), "eps": self.eps}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, fused; vectors (norms, biases) are not decayed.

    Args:
        offload: keep the moments in host memory and copy them to the device for each weight's step. This saves 8 bytes
            of device memory per weight and transfers 16 more per update. The weights are bit-identical.

    Source: arXiv 1711.05101.
    """

    offload: bool = False

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over `parameters`, in their order."""
        if self.offload:
            return WeightwiseOptimizer(self.groups(parameters), self.settings(), on_host=True)
        return torch.optim.AdamW(self.groups(parameters), **self.settings(), fused=True)


@dataclass(frozen=True)
class Schedule:
    """The share of the peak learning rate at each update of a run: W updates of warm-up, N in all.

        update i < W: (i + 1) / W      then, with p = (i - W) / (N - W):
        constant: 1      linear: f + (1 - f) (1 - p)      cosine: f + (1 - f) (1 + cos(pi p)) / 2

    Only the update after the last one would reach f, so no update has a learning rate of 0 unless the peak is 0.

    Args:
        kind: `constant`, or `linear` or `cosine`, which fall after the warm-up.
        total_updates: N, of the whole run.
        warmup: W, updates of linear rise.
        final_ratio: f, the share of the peak towards which `linear` and `cosine` fall.
    Source: `get_scheduler` of transformers: linear, cosine, cosine_with_min_lr, constant_with_warmup.
    Differs: its warm-up is i / W, so its first update changes nothing.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    total_updates: int = 1
    warmup: int = 0
    final_ratio: float = 0.0

    def factor(self, update: int) -> float:
        """The share of the peak at an update, counted from 0; after the last update, f."""
        if update < self.warmup:
            return (update + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        progress = min(1.0, (update - self.warmup) / max(1, self.total_updates - self.warmup))
        shape = 1 - progress if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_ratio + (1 - self.final_ratio) * shape


MOMENTS = ("exp_avg", "exp_avg_sq")
ADAM = ("step", *MOMENTS)


class WeightwiseOptimizer(torch.optim.Optimizer):
    """torch's fused AdamW, weight by weight, on this rank's slice: bit-identical, with the same names in its state. The
    state consists of plain tensors, or of tensors sharded like the weight, so that any number of ranks can write and
    read it. A subclass may implement another `step_weight`.

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
        if self.on_host:
            self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        """Wait once for the copies of the state to the host, which then may be read."""
        devices = {own_slice(p).device for group in self.param_groups for p in group["params"]}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def step_weight(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Update one weight from its gradient, on its device. Every rank calls it for the same weights in the same
        order."""
        weight, slots = own_slice(parameter), self.state[parameter]
        if not slots:
            slots["step"] = pinned(torch.zeros((), device=self.place("step", parameter)[1]), weight.device)
            slots.update({name: self.zeros(name, parameter, weight.dtype) for name in MOMENTS})
        kept = [own_slice(slots[name]) for name in ADAM]
        at_once = not weight.is_cuda  # elsewhere memory is not pinned
        step, first, second = here = [tensor.to(weight.device, non_blocking=not at_once) for tensor in kept]
        beta1, beta2 = group["betas"]
        adamw(
            [weight], [own_slice(parameter.grad)], [first], [second], [], [step],
            fused=True, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        for before, new in zip(kept, here, strict=True):
            if new is not before:
                before.copy_(new, non_blocking=not at_once)

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
        zeros = pinned(torch.zeros(sizes, dtype=dtype, device=device), shard.device)
        return sharded_as(parameter, zeros, shape)


def pinned(state: Tensor, device: torch.device) -> Tensor:
    """A state in host memory pinned where its weight is on a GPU, so that no copy waits; any other as it is."""
    return state.pin_memory() if device.type == "cuda" and state.device.type == "cpu" else state


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


class OnePassAdamW:
    """Replaces the step of torch's fused AdamW on a CPU, on its state: one pass over memory clips, steps and computes
    the norms of the weights. Unclipped steps are bit-identical. The norm of the gradient agrees with float64 to 1e-8;
    torch's float32 sum is off by 3e-4 for 135 million weights, and so are its clipped gradients.

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
            beta1, beta2 = group["betas"]
            step = partial(self.kernels.step, lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"])
            slots = [self._slots(p) for p in group["params"]]
            squares.append(step(slots, factor, weight_decay=group["weight_decay"]))
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
    """The one-pass step for an optimizer; None if the optimizer, its weights or the machine don't allow it."""
    if type(optimizer) is not torch.optim.AdamW or (kernels := adamw_kernels()) is None:
        return None
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    fine = all(type(p) is nn.Parameter and p.dtype == torch.float32 and p.is_contiguous() for p in weights)
    return OnePassAdamW(optimizer, kernels) if fine else None


def restore_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Copy the tensors of `TrainStack.state` into the optimizer.

    Raises:
        UserError: the tensors belong to another model, some are missing, or 8-bit moments have other blocks.
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
        state = value.to(place[1], copy=True)
        plain = not hasattr(state, "to_local")
        optimizer.state[parameters[owner]][key] = pinned(state, parameters[owner].device) if plain else state


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
    """The missing tensors. None are expected before the first update; later those that the optimizer names, or those
    that any weight has."""
    kinds = {name.partition("/")[0] for name in tensors}
    expected = set[str]()
    for name, parameter in parameters.items():
        if parameter.requires_grad and kinds:
            slots = optimizer.slots(parameter) if isinstance(optimizer, WeightwiseOptimizer) else kinds
            expected |= {f"{slot}/{name}" for slot in slots}
    return sorted(expected - tensors.keys())


def _place(
    optimizer: torch.optim.Optimizer, key: str, parameter: nn.Parameter, value: Tensor
) -> tuple[torch.Size, torch.device]:
    """The shape of an entry that is not a scalar, and the device of any entry."""
    if isinstance(optimizer, WeightwiseOptimizer):
        return optimizer.place(key, parameter)
    fused = bool(optimizer.defaults.get("fused"))  # its step counts are on the weights' device, others on the CPU
    return parameter.shape, parameter.device if value.dim() or fused else torch.device("cpu")
