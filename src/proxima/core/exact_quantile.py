"""A quantile that keeps all values, where `QuantileSketch` of `metrics` keeps their histogram."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quantile:
    """An exact quantile, linearly interpolated. It keeps all values.

    Args:
        values: [n] float64, detached, in any order.
        q: in [0, 1].
    """

    values: Tensor
    q: float

    @classmethod
    def over(cls, values: Tensor, mask: Tensor, q: float) -> Self:
        """The quantile of `values` [N] where `mask` [N] bool. Costs a device sync."""
        return cls(values.detach()[mask].to(torch.float64), q)

    def __add__(self, other: "Quantile") -> Self:
        if self.q != other.q:
            raise ValueError(f"Quantile: q={self.q} and q={other.q} don't merge.")
        return type(self)(torch.cat([self.values, other.values]), self.q)

    @property
    def value(self) -> float:
        """The quantile; NaN without values."""
        if not len(self.values):
            return float("nan")
        position = self.q * (len(self.values) - 1)
        ordered = self.values.sort().values
        low = int(position)
        high = min(low + 1, len(self.values) - 1)
        return float(torch.lerp(ordered[low], ordered[high], position - low))
