"""LoRA: small trained matrices alongside the frozen linear layers of a model, through the library peft.

`lora_layers.py` puts adapters on a model, switches them off and takes them off; `adapter_files.py` reads and writes
them. The model stays the Hugging Face model that it was: only its target layers are replaced, by peft's, so attention,
packing and decoders are not affected.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from proxima.data import require

NAME = "default"  # what peft calls the only adapter of a model
SCALAR_HEAD = "score"  # of a scalar model: trained in full, alongside the adapters of its decoder


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters: each target layer computes x (W + s B A)ᵀ, of which A [rank, in] and B [out, rank] alone are
    trained, in float32. B starts at 0: the policy starts as the base.

    With `dora` the result's rows are also scaled: m (W + s B A) / ‖W + s B A‖, with a trained m [out] and the norm as a
    constant in the backward pass.
    There is no dropout: a policy whose log-probs depend on a draw has no ratio to itself.

    Source: arXiv 2106.09685; rsLoRA 2312.03732; DoRA 2402.09353, section 4.3. Differs: peft and TRL train with the
    dropout of the adapter's config; here it is 0.
    """

    rank: Annotated[int, "r, rows of A and columns of B"] = 16
    alpha: Annotated[float, "s is alpha / rank; with rslora alpha / sqrt(rank)"] = 32.0
    targets: Annotated[
        Literal["all-linear"] | tuple[str, ...], "last parts of layer names; all-linear: every one but the output head"
    ] = "all-linear"
    rslora: Annotated[bool, "s = alpha / sqrt(rank), for large ranks"] = False
    dora: Annotated[bool, "train the norm of each row apart from its direction"] = False
    init: Annotated[Literal["uniform", "gaussian"], "draws of A; B is 0"] = "uniform"
    path: Annotated[str | None, "adapter to start from, made for this model; the reference stays the base"] = None

    def __post_init__(self) -> None:
        require(1 <= self.rank <= 1 << 16, "rank", self.rank, "must be in [1, 65536]")
        require(0 < self.alpha < math.inf, "alpha", self.alpha, "must be > 0 and finite")
        named = isinstance(self.targets, str) or (len(self.targets) > 0 and all(self.targets))
        require(named, "targets", self.targets, "must name a layer", remedy="all-linear names every one")


def is_adapted(module: nn.Module) -> bool:
    """True for a layer with an adapter."""
    return hasattr(module, "lora_A")


def base_layer(module: nn.Module) -> nn.Module:
    """The layer itself, without its adapter."""
    return module.get_base_layer() if is_adapted(module) else module  # type: ignore[operator]


def adapter_names(model: nn.Module) -> list[str]:
    """The names of the adapter's own parameters; empty without an adapter."""
    return [name for name, _ in model.named_parameters() if f".{NAME}." in name and ".lora_" in name]


def trained_names(model: nn.Module) -> list[str]:
    """The names of the parameters that a model with an adapter trains: `adapter_names`, and a scalar head."""
    head = f"{SCALAR_HEAD}.weight"
    return [*adapter_names(model), *(name for name, _ in model.named_parameters() if name == head)]


def weight_of(module: nn.Module) -> Tensor:
    """The effective weight of a linear layer, in the layout of the layer's own weight: with the adapter merged in,
    unless the adapter is off. Differentiable; sums in the wider dtype of base and adapter."""
    layer: Any = module
    weight: Tensor = layer.weight  # of an adapted layer, its base's
    if not is_adapted(module) or layer.disable_adapters:
        return weight
    with torch.autocast(weight.device.type, enabled=False):
        merged: Tensor = weight + layer.get_delta_weight(NAME)
        if NAME in layer.lora_magnitude_vector:
            axis = 0 if layer.fan_in_fan_out else 1
            norm = torch.linalg.norm(merged.detach(), dim=axis)
            merged = (layer.lora_magnitude_vector[NAME].weight / norm).unsqueeze(axis) * merged
    return merged
