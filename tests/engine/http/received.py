"""What a reader of a model's buckets gets."""

from typing import Any

import torch
from torch import Tensor

from proxima.engine.http.weights.buckets import filled_buckets, plan_of


def memory(size: int) -> Tensor:
    return torch.full((size,), 255, dtype=torch.uint8)


def received(model: Any, dtype: torch.dtype | None, *, file_names: bool = False) -> dict[str, Tensor]:
    """Each weight, by the name under which it is sent."""
    found = dict[str, Tensor]()
    plan = plan_of(model, dtype, file_names=file_names)
    for bucket, content in filled_buckets(model, plan, memory, file_names=file_names):
        for place in bucket.places:
            flat = content[place.start : place.end].clone()
            found[place.name] = flat.view(getattr(torch, place.dtype)).view(*place.shape)
    return found
