"""Compiles decoder layers, and what comes between the products of the output head, by torch.compile.

    layer = [norm] [q k v, norms of heads, rotary] attention [o] [sum, norm, gate up, silu, down, sum]      [ ] a graph
    of experts                                              … [sum, norm] [router] its choices [experts] [sum]

All layers of one shape share their graphs, and the number of tokens is a variable of them, so a new batch compiles
nothing. Attention runs between two graphs as it does without them: it has the layout of a batch, which changes each
time. FSDP's hooks and gradient checkpointing are outside the graphs: a layer that is recomputed runs them again. So are
the choices of a router, which are recorded and replayed, and experts that ranks split: they wait for numbers of rows,
and are a unit of FSDP, whose hooks a graph would leave out.

Not for tensor parallelism: there the matrices of a layer are DTensors within FSDP's, and what splits them are hooks
before and after each product. A graph would have to hold their collectives.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from proxima.data import FieldError
from proxima.model.architecture import TextConfig
from proxima.model.moe import FAMILIES, is_moe

BACKEND = "inductor"
FIELD = "model.compile"
MARK = "_proxima_compiled"  # of a layer, or of what is kept apart in it


def compile_layers(layers: Iterable[nn.Module], apart: Iterable[nn.Module] = ()) -> None:
    """Compile the forward passes of these layers, in place; each graph is made when it is first run. Modules in them
    that are kept `apart` run between graphs. Idempotent."""
    for module in apart:
        if not hasattr(module, MARK):
            module.forward = torch.compiler.disable(module.forward)
            setattr(module, MARK, True)
    for layer in layers:
        if not hasattr(layer, MARK):
            layer.forward = torch.compile(layer.forward, backend=BACKEND, dynamic=True)
            setattr(layer, MARK, True)


def check_compiles(config: Any, *, attention: str, tensor_parallel: int = 1) -> None:
    """Raise FieldError for a model, by its config of transformers, or a layout whose layers are not compiled here."""
    remedy = "set it to false"
    if TextConfig.of(config).experts and not is_moe(config):
        kinds = ", ".join(FAMILIES)
        reason = f"is for mixtures of experts of the kinds {kinds} only, and this is {TextConfig.of(config).family}"
        raise FieldError(FIELD, True, reason, remedy=remedy)
    if attention == "padded":
        raise FieldError(FIELD, True, "is not for model.attention=padded", remedy=remedy)
    if tensor_parallel > 1:
        reason = "can't be combined with placement.tensor_parallel, whose hooks are between a layer's products"
        raise FieldError(FIELD, True, reason, remedy=remedy)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled at its first call."""
    return _compiled(function, BACKEND)


@cache
def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, backend=backend)
    return made


@cache
def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a compiled layer calls it between two of its graphs."""
    outside: Callable[..., Any] = torch.compiler.disable(function)
    return outside
