"""AdamW's step on float32 weights in one pass over memory, by `adamw.cpp`."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from proxima.kernels.compiled import functions, library, unavailable

EXACT = ("-ffp-contract=off", "-fno-math-errno")  # no roundings other than those written
Slots = tuple[Tensor, Tensor, Tensor, Tensor, float]  # weight, gradient, both moments, step number


class AdamWKernels:
    """The functions, over contiguous float32 CPU tensors of any sizes."""

    def __init__(self) -> None:
        compiled = library(Path(__file__).with_suffix(".cpp"), *EXACT)
        self._calls = functions(compiled, {"squares": "ppn", "adamw": "ppdddddfn"})

    def gradient_norm(self, weights: Sequence[Slots]) -> float:
        """The 2-norm of all gradients, summed in float64, except for runs of 16,384 numbers, which are summed in
        float32."""
        total = torch.empty(1, dtype=torch.float64)
        self._calls["squares"](_table(weights), total, len(weights))
        return math.sqrt(total)

    def step(
        self, weights: Sequence[Slots], factor: float, *, lr: float, beta1: float, beta2: float, eps: float,
        weight_decay: float,
    ) -> tuple[float, float]:  # fmt: skip
        """Update weights and moments in place from `factor` times the gradients: with torch's bits, except for the last
        numbers of a tensor whose size is not a multiple of 16. Returns the sums of the squares of the weights before
        and after."""
        totals = torch.empty(2, dtype=torch.float64)
        self._calls["adamw"](_table(weights), totals, lr, beta1, beta2, eps, weight_decay, factor, len(weights))
        before, after = totals.tolist()
        return before, after


def _table(weights: Sequence[Slots]) -> Tensor:
    """[n, 6] int64, the layout of `Tensors` in `adamw.cpp`."""
    rows: list[list[int]] = []
    for weight, gradient, first, second, step in weights:
        pointers = [each.data_ptr() for each in (weight, gradient, first, second)]
        rows.append([*pointers, weight.numel(), int(step)])
    return torch.tensor(rows)


@cache
def adamw_kernels() -> AdamWKernels | None:
    """The kernels; None if the machine has none."""
    if unavailable():
        return None
    return AdamWKernels()
