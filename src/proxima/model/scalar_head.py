"""One number for each hidden state."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxima.model.parallel.sharded import is_sharded


def scalar_head(hidden: Tensor, head: nn.Linear) -> Tensor:
    """[N] float32 (float64 for a float64 head): hidden [N, D] times the head's weights [1, D]."""
    values: Tensor = head(hidden) if is_sharded(head) else exact_product(hidden, head.weight)
    return values


def exact_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """`scalar_head` of whole weights, never in half precision. One product per row, so that no row depends on its
    neighbours."""
    exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(exact), weight.to(exact))[:, 0]
