"""Compiles decoder layers, and what comes between the products of the output head, by torch.compile.

    layer = [norm] [q k v, norms of heads, rotary] attention [o] [sum, norm, gate up, silu, down, sum]      [ ] a graph

All layers of one shape share their graphs, and the number of tokens is a variable of them, so a new batch compiles
nothing. Attention runs between two graphs as it does without them: it has the layout of a batch, which changes each
time. FSDP's hooks and gradient checkpointing are outside the graphs: a layer that is recomputed runs them again.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from proxima.data import FieldError

BACKEND = "inductor"
FIELD = "model.compile"
MARK = "_proxima_compiled"  # of a layer


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the forward passes of these modules, in place; each graph is made when it is first run. Idempotent."""
    for layer in layers:
        if not hasattr(layer, MARK):
            layer.forward = torch.compile(layer.forward, backend=BACKEND, dynamic=True)
            setattr(layer, MARK, True)


def check_compiles(config: Any, *, attention: str, tensor_parallel: int = 1) -> None:
    """Raise FieldError for a model, by its config of transformers, or a layout whose layers are not compiled here."""
    remedy = "set it to false"
    text = config.get_text_config()
    if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
        reason = "is not for mixtures of experts, whose routers answer in the middle of a layer"
        raise FieldError(FIELD, True, reason, remedy=remedy)
    if attention == "padded":
        raise FieldError(FIELD, True, "is not for model.attention=padded", remedy=remedy)
    if tensor_parallel > 1:
        raise FieldError(FIELD, True, "can't be combined with placement.tensor_parallel", remedy=remedy)


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
