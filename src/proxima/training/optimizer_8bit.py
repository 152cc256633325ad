"""AdamW with moments of 8 bits, by torchao."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from proxima.data import UserError
from proxima.model.parallel.sharding import own_slice
from proxima.training.optimizer import ADAM, MOMENTS, Adam, WeightwiseOptimizer

BLOCK, SMALLEST_BLOCK = 256, 32  # neighbouring elements of a row that share a scale
SIGNED = MOMENTS[0]
SMALLEST = 4096  # elements of a matrix below which its moments are not quantised, as in bitsandbytes
AT_ONCE = 1 << 24  # elements that are float32 at once; torchao needs some 50 bytes for each


@dataclass(frozen=True)
class AdamW8bit(Adam):
    """AdamW with both moments stored in 8 bits: each element is a code into a table of 256 values with a dynamic
    exponent, times the largest magnitude of its block. About 2 bytes per weight instead of 8.

        m = table[code] * scale, by block      m, v ← AdamW's, in float32      codes and scales of m and v again

    A block is at most 256 elements of one row, so the number of ranks that share rows does not change the result. But a
    block must also divide a rank's part of a row, which placement.tensor_parallel may cut: resume such a run with the
    same tensor_parallel. Vectors, and matrices of fewer than 4096 elements or whose rows allow no block of at least 32,
    keep moments of their own dtype.

    Needs: `pip install 'proxima-rl[low-bit]'`.
    Source: arXiv 2110.02861; torchao's `AdamW8bit`.
    Differs: torchao's blocks extend over rows, and it updates a matrix in one compiled step; here some rows at a time,
        in eager mode.
    """

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over `parameters`, in their order.

        Raises:
            UserError: torchao is not installed.
        """
        if find_spec("torchao") is None:
            remedy = "pip install 'proxima-rl[low-bit]'"
            raise UserError("optimizer 'adamw_8bit' needs the package torchao", remedy=remedy)
        return EightBitAdamW(self.groups(parameters), self.settings())

    def moments(self, matrices: int, others: int) -> tuple[int, int]:
        moments = 2 * (matrices + others)
        return 0, moments + 4 * moments // BLOCK


class EightBitAdamW(WeightwiseOptimizer):
    """torchao's update, which stores the moments as torchao's codes: `exp_avg` (uint8, of the weight's shape) and
    `exp_avg_scale` (float32, with a column per block), and likewise for `exp_avg_sq`."""

    def __init__(self, groups: Iterable[dict[str, Any]], settings: dict[str, Any]) -> None:
        super().__init__(groups, settings)
        from torchao.optim import adam, quant_utils

        self.update = adam.single_param_adam
        self.codes = quant_utils
        self.tables = {name: torch.tensor(quant_utils.create_dynamic_map(name == SIGNED)) for name in MOMENTS}

    def slots(self, parameter: nn.Parameter) -> tuple[str, ...]:
        if block_of(parameter):
            return (*ADAM, *(_scale_of(name) for name in MOMENTS))
        return ADAM

    def place(self, slot: str, parameter: nn.Parameter) -> tuple[torch.Size, torch.device]:
        shape = parameter.shape
        if slot in map(_scale_of, MOMENTS):
            shape = torch.Size((*shape[:-1], shape[-1] // max(1, block_of(parameter))))
        device = torch.device("cpu") if slot == "step" else parameter.device
        return shape, device

    def step_weight(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        weight = own_slice(parameter)
        gradient = own_slice(parameter.grad)
        slots = self.state[parameter]
        block = block_of(parameter)
        if not slots:
            slots["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                if block:
                    scale = _scale_of(name)
                    slots[name] = self.zeros(name, parameter, torch.uint8)
                    slots[scale] = self.zeros(scale, parameter, torch.float32, block)
                else:
                    slots[name] = self.zeros(name, parameter, weight.dtype)
        slots["step"] += 1
        shards = {name: own_slice(slot) for name, slot in slots.items()}
        beta1, beta2 = group["betas"]
        for rows in _row_ranges(weight):
            part = {name: _rows_of(slot, rows) for name, slot in shards.items()}
            moments = [self._read(part, name) for name in MOMENTS]
            self.update(
                weight[rows], gradient[rows], part["step"], *moments, None, torch.tensor(float(group["lr"])),
                beta1, beta2, group["weight_decay"], group["eps"], True, False,
            )  # fmt: skip
            if block:
                for name, moment in zip(MOMENTS, moments, strict=True):
                    self._write(part, name, moment, block)

    def _read(self, slots: dict[str, Tensor], name: str) -> Tensor:
        """Read a moment: a float32 copy if it is quantised, otherwise the entry itself."""
        codes = slots[name]
        scale = slots.get(_scale_of(name))
        if scale is None:
            return codes
        self.tables[name] = self.tables[name].to(codes.device)
        moment: Tensor = self.codes.dequant_with_qmap(codes, self.tables[name], scale.flatten())
        return moment

    def _write(self, slots: dict[str, Tensor], name: str, moment: Tensor, block: int) -> None:
        shares, scale = self.codes.scale_tensor(moment, block)
        slots[name].copy_(self.codes.quantize_8bit_with_qmap(shares, self.tables[name]))
        slots[_scale_of(name)].copy_(scale.view_as(slots[_scale_of(name)]))


def _scale_of(moment: str) -> str:
    return f"{moment}_scale"


def block_of(parameter: Any) -> int:
    """The number of elements in a block of this weight's moments; 0: they are not quantised. The same on every rank."""
    if parameter.dim() < 2 or parameter.numel() < SMALLEST:
        return 0
    width = parameter.shape[-1]  # of a row, on this rank
    if hasattr(parameter, "placements"):
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            if placement.is_shard(parameter.dim() - 1):
                if width % size:
                    return 0
                width //= size
    block: int = math.gcd(width, BLOCK)
    if block < SMALLEST_BLOCK:
        return 0
    return block


def _rows_of(slot: Tensor, rows: Any) -> Tensor:
    """These rows of a state entry; a scalar as it is."""
    if slot.dim() == 0:
        return slot
    return slot[rows]


def _row_ranges(weight: Tensor) -> Iterator[Any]:
    """Ranges of rows that are computed at once; none for an empty slice."""
    if not weight.dim():
        yield ...
        return
    if not weight.numel():
        return
    rows = max(1, AT_ONCE // math.prod(weight.shape[1:]))
    for start in range(0, len(weight), rows):
        yield slice(start, start + rows)
