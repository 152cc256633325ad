"""Gradient checkpointing: a layer's activations are computed again in the backward pass, not kept.

Hugging Face's own switch takes effect in training mode only, in which dropout, the jitter of routers and whatever else
reads `self.training` are on: the log-probs of the pass that trains would then be random, and those of another model.
Here the layers are wrapped instead, and a model stays in eval mode.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from proxima.data import require

MARK = "_proxima_recomputes"  # of a layer that is wrapped


def recompute_layers(model: Any) -> None:
    """Make the layers of a Hugging Face model recompute their activations in a backward pass. Idempotent.

    A pass gives the same bits with and without. Without gradient nothing changes.

    Raises:
        FieldError: the model names no layers that can be recomputed; Hugging Face's own switch refuses it too.
    """
    layers = list(_layers(model))
    remedy = "set it to false"
    problem = f"is not possible: a {model.config.model_type} has no layers that can be recomputed"
    require(bool(layers), "model.gradient_checkpointing", True, problem, remedy=remedy)
    for layer in layers:
        if not recomputes(layer):
            layer.forward = partial(recomputed, layer.forward)
            setattr(layer, MARK, True)


def recomputes(layer: nn.Module) -> bool:
    """True for a layer that `recompute_layers` has wrapped."""
    return hasattr(layer, MARK)


def recomputed(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `function`, whose activations the backward pass computes again, if there will be one."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # Nothing in a proven model draws random numbers: their states need not be kept.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _layers(model: nn.Module) -> Iterator[Any]:
    """What Hugging Face's switch would checkpoint: the layers of the decoder, and of a tower that sees images."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            yield module
