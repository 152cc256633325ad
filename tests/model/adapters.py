"""Tiny models with an adapter whose matrices are all away from their start."""

from pathlib import Path

import torch

from proxima.model.adapters.lora import Lora, adapter_names
from proxima.model.load import load
from proxima.model.pretrained import LoadedModel


def with_adapter(folder: Path, lora: Lora | None = None, *, moved: bool = True, **settings) -> LoadedModel:
    """`load` with adapters on; `moved` gives B, which starts at 0, draws of its own, and DoRA's norms another size."""
    loaded = load(
        str(folder), lora=lora or Lora(rank=4, alpha=8), device="cpu", seed=settings.pop("seed", 7), **settings
    )
    if moved:
        move(loaded)
    return loaded


def move(loaded: LoadedModel, seed: int = 3) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in adapter_names(loaded.model):
            parameter = loaded.model.get_parameter(name)
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
            elif "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=draw))
