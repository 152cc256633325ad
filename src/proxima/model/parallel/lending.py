"""Reading a module's weights without knowing whether it is sharded. Light: imports no torch.distributed."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from proxima.model.perturbation import perturbed_weights

LENDER = "proxima_lender"  # the attribute of a module of `LayerLender`


def lender_of(module: nn.Module) -> Any:
    """The `LayerLender` whose module this is; None for any other module, which has its weights."""
    return getattr(module, LENDER, None)


@contextmanager
def lent(module: nn.Module) -> Iterator[None]:
    """Within the block the weights of the module may be read. No effect for a module that has them."""
    lender = lender_of(module)
    if lender is None:
        yield
        return
    with lender.lending():
        yield


def perturbing(module: nn.Module, amounts: list[float]) -> AbstractContextManager[None]:
    """`perturbed_weights`, of the sharded module if this is a lender's."""
    lender = lender_of(module)
    if lender is None:
        return perturbed_weights(module, amounts)
    change: AbstractContextManager[None] = lender.perturbing(amounts)
    return change


@contextmanager
def rounded(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Within the block, a lender's weights are rounded to this dtype before they are gathered, so that fewer bytes are;
    None: they are not. No effect on a module that has its weights, or has adapters, which are merged in their own."""
    lender = lender_of(module)
    if lender is None or dtype is None or getattr(module, "peft_config", None) is not None:
        yield
        return
    lender.drop()
    lender.dtype = dtype
    try:
        yield
    finally:
        lender.drop()
        lender.dtype = None
