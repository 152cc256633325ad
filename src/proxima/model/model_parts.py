"""A model taken apart: its decoder stack, and the linear layer on top."""

from typing import Any

from torch import nn

from proxima.data import UserError
from proxima.model.lora import SCALAR_HEAD, base_layer
from proxima.model.parallel.sharded import plain_type


def parts(model: nn.Module) -> tuple[Any, Any]:
    """The decoder stack of a causal language model, and its output head.

    Raises:
        UserError: it does not say which of its modules these are, or the head is not a linear layer.
    """
    untyped: Any = model
    backbone = untyped.get_decoder() if hasattr(untyped, "get_decoder") else untyped.base_model
    head, name = untyped.get_output_embeddings(), plain_type(model).__name__
    if backbone is untyped:
        raise UserError(f"{name} is not supported: it does not say which of its modules is the decoder")
    if (kind := plain_type(base_layer(head))) is not nn.Linear:
        raise UserError(f"{name} is not supported: its output head is a {kind.__name__}, not a linear layer")
    return backbone, head


def scalar_parts(model: nn.Module) -> tuple[Any, Any]:
    """The decoder stack of a scalar model, and its head."""
    untyped: Any = model
    return untyped.get_decoder(), getattr(untyped, SCALAR_HEAD)
