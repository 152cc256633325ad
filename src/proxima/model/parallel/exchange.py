"""Differentiable collectives."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.settings = sent, received, group
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradients[0], *ctx.settings), None, None, None


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def exchange(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    """Send `rows` [Σ sent, …] to the ranks of the group, `sent` rows to each, and return [Σ received, …], `received`
    rows from each, in the order of the ranks. Counts may differ, and be 0. Collective, and so is its backward pass."""
    out: Tensor = _Exchange.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return out


class _AddParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def add_parts(part: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of a group, all of which then compute the same from it: the gradient of a part is that of
    the sum, counted once. Collective; its backward pass is not."""
    whole: Tensor = _AddParts.apply(part, group)  # type: ignore[no-untyped-call]
    return whole
