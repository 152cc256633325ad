"""Reading a module's weights without knowing whether it is sharded. Light: imports no torch.distributed."""

import copy
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
    change: AbstractContextManager[None]
    change = perturbed_weights(module, amounts) if lender is None else lender.perturbing(amounts)
    return change


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the module with weights and buffers of another dtype; a lender's is lent with it."""
    lender = lender_of(module)
    converted: nn.Module = copy.deepcopy(module).to(dtype) if lender is None else lender.in_dtype(dtype)
    return converted
