"""Transformers' mixtures of experts with stacked matrices: a module `experts` takes hidden states [T, D] and the
router's choices and weights [T, K], and computes one grouped product per matrix."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

IN_AUTOCAST = "grouped_mm_in_autocast"


def stacked_experts(model: nn.Module) -> Iterator[Any]:
    """The modules of this interface, whose weights are all [experts, …]."""
    for module in model.modules():
        weights = list(module.parameters())
        if hasattr(module, "_apply_gate") and weights and all(len(p) == module.num_experts for p in weights):
            yield module


class OtherWeights:
    """A module as its forward method reads it, but with other weights and settings, and without hooks."""

    def __init__(self, module: Any, weights: Mapping[str, Tensor], **settings: Any) -> None:
        self.module, self.weights = module, weights
        vars(self).update({**weights, **settings})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def compute_in_autocast(model: nn.Module) -> None:
    """Make grouped products follow autocast, as linear layers do. Autocast does not cover them: with float32 weights
    they would be float32, for which a GPU has no kernel, so that it computes expert by expert."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IN_AUTOCAST, _grouped_in_autocast)
    for experts in stacked_experts(model):
        if experts.config._experts_implementation == "grouped_mm":
            experts.config._experts_implementation = IN_AUTOCAST


def _grouped_in_autocast(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        own = experts.weights if isinstance(experts, OtherWeights) else dict(experts.named_parameters(recurse=False))
        lowered = {name: weight.to(dtype) for name, weight in own.items()}
        experts = OtherWeights(experts, lowered)
    return grouped_mm_experts_forward(experts, hidden, top_k_index, top_k_weights)
