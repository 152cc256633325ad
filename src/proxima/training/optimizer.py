"""Optimizers and learning-rate schedules: their settings, how they step, and how their state is restored.

AdamW is torch's fused step over all weights, or weight by weight (`WeightwiseOptimizer`), or `OnePassAdamW`, which also
clips and measures in the same pass over memory; `optimizer_8bit` and `optimizer_muon` are the other kinds.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from proxima.data import UserError, require
from proxima.data.transfer import ALONE
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
                vector = parameter.dim() < 2
                mesh = getattr(parameter, "device_mesh", None)
                split.setdefault((vector, mesh), []).append(parameter)
        groups = sorted(split.items(), key=lambda group: group[0][0])
        out: list[dict[str, Any]] = []
        for (vector, _), members in groups:
            decay = 0.0 if vector else self.weight_decay
            out.append({"params": members, "weight_decay": decay})
        return out

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
        offload: keep the moments in host memory and copy them to the device for each weight's step, see
            `OffloadedAdamW`. This saves 8 bytes of device memory per weight and transfers 16 more per update. The
            weights are bit-identical.

    Source: arXiv 1711.05101.
    """

    offload: bool = False

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over `parameters`, in their order."""
        if self.offload:
            return OffloadedAdamW(self.groups(parameters), self.settings())
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
        if self.kind == "linear":
            shape = 1 - progress
        else:
            shape = 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_ratio + (1 - self.final_ratio) * shape


MOMENTS = ("exp_avg", "exp_avg_sq")
ADAM = ("step", *MOMENTS)
PIECE = 1 << 24  # elements of a weight whose offloaded moments are copied at once
BUFFERS = 3  # of pieces on the device: one arrives, one is computed, one leaves


class WeightwiseOptimizer(torch.optim.Optimizer):
    """torch's fused AdamW, weight by weight, on this rank's slice: bit-identical, with the same names in its state. The
    state consists of plain tensors, or of tensors sharded like the weight, so that any number of ranks can write and
    read it. A subclass may implement another `step_weight`.

    Args:
        groups: as torch's optimizers take them.
        defaults: of a group's settings.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, {"weight_decay": 0.0} | defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's may return a closure's loss
        self.step_weights()

    def step_weights(self) -> None:
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_weight(parameter, group)

    def step_weight(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Update one weight from its gradient, on its device. Every rank calls it for the same weights in the same
        order."""
        step, *moments = (own_slice(tensor) for tensor in self.slots_of(parameter))
        adamw_step(own_slice(parameter), own_slice(parameter.grad), moments, step, group)

    def slots_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """The state of AdamW for a weight, in the order of `ADAM`, made at its first step."""
        slots = self.state[parameter]
        weight = own_slice(parameter)
        if not slots:
            slots["step"] = torch.zeros((), device=self.place("step", parameter)[1])
            slots.update({name: self.zeros(name, parameter, weight.dtype) for name in MOMENTS})
        return [slots[name] for name in ADAM]

    def slots(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The state entries of a weight after its first step."""
        return ADAM

    def place(self, slot: str, parameter: nn.Parameter) -> tuple[torch.Size, torch.device]:
        """The shape of a state entry that is not a scalar, and the device of any entry."""
        return parameter.shape, parameter.device

    def zeros(self, slot: str, parameter: nn.Parameter, dtype: torch.dtype, columns: int = 1) -> Tensor:
        """A new state entry, with one element for every `columns` elements of a row of the weight."""
        shape, device = self.place(slot, parameter)
        shard = own_slice(parameter)
        sizes = tuple(shard.shape)
        if columns > 1:
            sizes = (*sizes[:-1], sizes[-1] // columns)
        zeros = pinned(torch.zeros(sizes, dtype=dtype, device=device), shard.device)
        return sharded_as(parameter, zeros, shape)


def adamw_step(
    weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: Tensor, group: Mapping[str, Any]
) -> None:
    """Torch's fused AdamW on a weight, its moments and the count of its steps, all on one device."""
    first, second = moments
    beta1, beta2 = group["betas"]
    adamw(
        [weight], [gradient], [first], [second], [], [step],
        fused=True, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip


class OffloadedAdamW(WeightwiseOptimizer):
    """AdamW with moments in pinned host memory. A step computes on the weights' device, a piece of a weight after the
    other, with copies on streams of their own and `BUFFERS` buffers of `PIECE` elements for each moment:

        up       moments of piece 1 | of piece 2 | of piece 3, once a buffer is free  ··
        own                         | step 1     | step 2                             ··
        down                                     | moments of piece 1 | of piece 2    ··

    The host waits for them once a step.
    """

    def place(self, slot: str, parameter: nn.Parameter) -> tuple[torch.Size, torch.device]:
        return parameter.shape, torch.device("cpu")

    def step_weights(self) -> None:
        weights = [own_slice(p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not weights or weights[0].device.type in ALONE:
            super().step_weights()
            return

        pieces = list(self._pieces())
        if pieces:
            self._step_pieces(pieces, weights[0].device)

    def _pieces(self) -> Iterator["Piece"]:
        """Parts of at most `PIECE` elements of every weight, its gradient and its moments; a weight that has gaps in
        memory is one. The steps of the weights are counted."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                step, *moments = self.slots_of(parameter)
                steps = float(step)
                step += 1
                parts = [own_slice(tensor) for tensor in (parameter, parameter.grad, *moments)]
                size = max(1, parts[0].numel())
                if all(tensor.is_contiguous() for tensor in parts[:2]):
                    parts = [tensor.view(-1) for tensor in parts]
                    size = PIECE
                for weight, gradient, first, second in zip(*(tensor.split(size) for tensor in parts), strict=True):
                    if weight.numel():
                        yield Piece(weight, gradient, (first, second), steps, group)

    def _step_pieces(self, pieces: Sequence["Piece"], device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        own = module.current_stream(device)
        up = module.Stream(device)
        down = module.Stream(device)
        most = max(piece.weight.nbytes for piece in pieces)
        buffers = [[torch.empty(most, dtype=torch.uint8, device=device) for _ in MOMENTS] for _ in range(BUFFERS)]
        free: list[Any] = [None] * BUFFERS  # the event after which each is
        up.wait_stream(own)  # which may still read the memory of the buffers
        for number, piece in enumerate(pieces):
            buffer = number % BUFFERS
            moments = [each[: piece.weight.nbytes].view(piece.weight.dtype) for each in buffers[buffer]]
            moments = [each.view(piece.weight.shape) for each in moments]
            with module.stream(up):
                if free[buffer] is not None:
                    up.wait_event(free[buffer])
                for there, here in zip(moments, piece.moments, strict=True):
                    there.copy_(here, non_blocking=True)
                arrived = up.record_event()
            own.wait_event(arrived)
            step = torch.full((), piece.steps, device=device)
            adamw_step(piece.weight, piece.gradient, moments, step, piece.group)
            computed = own.record_event()
            with module.stream(down):
                down.wait_event(computed)
                for there, here in zip(moments, piece.moments, strict=True):
                    here.copy_(there, non_blocking=True)
                free[buffer] = down.record_event()
        own.wait_stream(down)  # before the buffers are freed
        down.synchronize()


class Piece(NamedTuple):
    """A part of a weight with its gradient, on the device, its moments, on the host, and the number of its steps."""

    weight: Tensor
    gradient: Tensor
    moments: tuple[Tensor, Tensor]
    steps: float
    group: Mapping[str, Any]


def pinned(state: Tensor, device: torch.device) -> Tensor:
    """A state in host memory pinned where its weight is on a GPU, so that no copy waits; any other as it is."""
    if device.type not in ALONE and state.device.type == "cpu" and state.dim():
        return state.pin_memory()
    return state


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
        self.optimizer = optimizer
        self.kernels = kernels
        self.weight_norms = (0.0, 0.0)  # before and after the last step

    def gradient_norm(self) -> Tensor:
        """[] float32, of all gradients; every weight has one."""
        return torch.tensor(self.kernels.gradient_norm([self._slots(p) for p in self._parameters()]))

    @torch.no_grad()
    def step(self, most: float, norm: Tensor) -> None:
        """Step on the gradients, of norm `norm`, clipped to `most`; 0: not clipped."""
        factor = 1.0
        if most > 0:  # as torch clips
            factor = float((most / (norm + 1e-6)).clamp(max=1.0))
        torch._foreach_add_([self._state(p)["step"] for p in self._parameters()], 1)
        squares = []
        for group in self.optimizer.param_groups:
            beta1, beta2 = group["betas"]
            step = partial(self.kernels.step, lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"])
            slots = [self._slots(p) for p in group["params"]]
            squares.append(step(slots, factor, weight_decay=group["weight_decay"]))
        before = math.sqrt(sum(of_group for of_group, _ in squares))
        after = math.sqrt(sum(of_group for _, of_group in squares))
        self.weight_norms = (before, after)

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
    if type(optimizer) is not torch.optim.AdamW:
        return None
    kernels = adamw_kernels()
    if kernels is None:
        return None
    for group in optimizer.param_groups:
        for weight in group["params"]:
            plain = type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.is_contiguous()
            if not plain:
                return None
    return OnePassAdamW(optimizer, kernels)


def restore_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Copy the tensors of `TrainStack.state` into the optimizer.

    Raises:
        UserError: the tensors belong to another model, some are missing, or 8-bit moments have other blocks.
    """
    missing = _missing(optimizer, parameters, tensors)
    if missing:
        _refuse_other_blocks(missing[0], tensors)
        raise UserError(f"the optimizer state lacks {missing[0]!r} ({len(missing)} in all), which this model has")
    for name, value in tensors.items():
        key, _, owner = name.partition("/")
        place = None
        if owner in parameters:
            place = _place(optimizer, key, parameters[owner], value)
        if place is None or (value.dim() and value.shape != place[0]):
            _refuse_other_blocks(name, tensors)
            raise UserError(
                f"the optimizer state holds {name!r} of shape {list(value.shape)}, which this model does not have"
            )
        state = value.to(place[1], copy=True)
        own = pinned(own_slice(state), own_slice(parameters[owner]).device)
        optimizer.state[parameters[owner]][key] = sharded_as(state, own, state.shape)


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
            slots: Iterable[str] = kinds
            if isinstance(optimizer, WeightwiseOptimizer):
                slots = optimizer.slots(parameter)
            expected |= {f"{slot}/{name}" for slot in slots}
    return sorted(expected - tensors.keys())


def _place(
    optimizer: torch.optim.Optimizer, key: str, parameter: nn.Parameter, value: Tensor
) -> tuple[torch.Size, torch.device]:
    """The shape of an entry that is not a scalar, and the device of any entry."""
    if isinstance(optimizer, WeightwiseOptimizer):
        return optimizer.place(key, parameter)
    fused = bool(optimizer.defaults.get("fused"))  # its step counts are on the weights' device, others on the CPU
    device = parameter.device if value.dim() or fused else torch.device("cpu")
    return parameter.shape, device
