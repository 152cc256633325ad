"""Statistics that travel: sums not yet divided and extremes, both merging with `+` over micro-batches, ranks and steps."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class SumCount:
    """A mean that has not been divided yet.

    Args:
        sum: [] float64, detached, on the device of the values: making one costs no device sync.
        count: [] float64, how many values (or how much weight) went in.

    `a + b` is the statistic of both parts together; `value` divides, and is NaN when nothing went in.
    """

    sum: Tensor
    count: Tensor

    @classmethod
    def over(cls, values: Tensor, mask: Tensor) -> Self:
        """The mean of `values` [N] where `mask` [N] bool; what lies outside the mask may be NaN. A bool `values` gives a share."""
        chosen = torch.where(mask, values.detach().to(torch.float64), 0.0)
        return cls(chosen.sum(), mask.sum(dtype=torch.float64))

    def __add__(self, other: "SumCount") -> Self:
        return type(self)(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float:
        """sum / count as a Python float (this one syncs)."""
        count = float(self.count)
        return float(self.sum) / count if count else float("nan")


@dataclass(frozen=True)
class Peak:
    """A maximum, or with `largest=False` a minimum.

    Args:
        extreme: [] float64, detached; -inf (or inf) when nothing went in.
        largest: True for a maximum.
    """

    extreme: Tensor
    largest: bool = True

    @classmethod
    def over(cls, values: Tensor, mask: Tensor, *, largest: bool = True) -> Self:
        """The extreme of `values` [N] where `mask` [N] bool; N may be 0."""
        nothing = -torch.inf if largest else torch.inf
        chosen = torch.where(mask, values.detach().to(torch.float64), nothing)
        chosen = torch.cat([chosen.flatten(), chosen.new_full((1,), nothing)])
        return cls(chosen.amax() if largest else chosen.amin(), largest)

    def __add__(self, other: "Peak") -> Self:
        if self.largest != other.largest:
            raise ValueError("Peak: a maximum and a minimum don't merge.")
        pick = torch.maximum if self.largest else torch.minimum
        return type(self)(pick(self.extreme, other.extreme), self.largest)

    @property
    def value(self) -> float:
        """The extreme as a Python float; NaN when nothing went in (this one syncs)."""
        value = float(self.extreme)
        return value if value not in (float("inf"), float("-inf")) else float("nan")


Metrics = dict[str, SumCount | Peak]


def merge(parts: list[Metrics]) -> Metrics:
    """One dictionary for all parts; a key that only some parts have keeps what they have."""
    out: Metrics = {}
    for part in parts:
        for key, value in part.items():
            out[key] = out[key] + value if key in out else value  # type: ignore[operator]  # same key, same kind
    return out


def k1(log_ratio: Tensor) -> Tensor:
    """Unbiased estimate of KL(p‖q) from samples of p, with `log_ratio` = log q − log p: −log_ratio. [N] → [N], nats; may be negative."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Biased, low variance, ≥ 0: ½ log_ratio², with `log_ratio` = log q − log p on samples of p. [N] → [N], nats."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """Unbiased and ≥ 0: exp(log_ratio) − 1 − log_ratio, with `log_ratio` = log q − log p on samples of p. [N] → [N], nats.

    `expm1` keeps small values exact where exp − 1 would cancel. No clamp: the caller bounds `log_ratio` if it must stay finite.
    Source: Schulman, "Approximating KL divergence", 2020.
    """
    return torch.expm1(log_ratio) - log_ratio
