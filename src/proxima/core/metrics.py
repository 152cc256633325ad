"""Mergeable statistics: `+` merges two of one kind, over micro-batches, ranks and steps; `value` gives the number."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

SpreadKind = Literal["std", "sample_std", "effective_sample_size"]


@dataclass(frozen=True)
class SumCount:
    """A mean before division.

    Args:
        sum: [] float64, detached, on the device of the values: no device sync.
        count: [] float64, number of values (or total weight).
    """

    sum: Tensor
    count: Tensor

    @classmethod
    def over(cls, values: Tensor, mask: Tensor) -> Self:
        """The mean of `values` [N] where `mask` [N] bool; other values may be NaN. Bool `values` give a share."""
        chosen = torch.where(mask, values.detach().to(torch.float64), 0.0)
        return cls(chosen.sum(), mask.sum(dtype=torch.float64))

    def __add__(self, other: "SumCount") -> Self:
        return type(self)(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float:
        """sum / count, NaN without values; costs a device sync, as does every `value`."""
        count = float(self.count)
        if count == 0:
            return math.nan
        return float(self.sum) / count


@dataclass(frozen=True)
class Peak:
    """A maximum, or with `largest=False` a minimum.

    Args:
        extreme: [] float64, detached; -inf (or inf) without values.
    """

    extreme: Tensor
    largest: bool = True

    @classmethod
    def over(cls, values: Tensor, mask: Tensor, *, largest: bool = True) -> Self:
        """The extreme of `values` [N] where `mask` [N] bool; N may be 0."""
        empty = -torch.inf if largest else torch.inf
        chosen = torch.where(mask, values.detach().to(torch.float64), empty)
        chosen = torch.cat([chosen.flatten(), chosen.new_full((1,), empty)])
        extreme = chosen.amax() if largest else chosen.amin()
        return cls(extreme, largest)

    def __add__(self, other: "Peak") -> Self:
        farther = torch.maximum if self.largest else torch.minimum
        return type(self)(farther(self.extreme, other.extreme), self.largest)

    @property
    def value(self) -> float:
        """The extreme; NaN without values."""
        value = float(self.extreme)
        if math.isfinite(value):
            return value
        return math.nan


@dataclass(frozen=True)
class Spread:
    """Count, mean and sum of squared deviations; merged without cancellation, by Chan et al. (1979).

    Args:
        count, mean, squares: [] float64, detached.
        kind: the statistic that `value` gives: `std` (ddof = 0), `sample_std` (ddof = 1), `effective_sample_size`:
            mean² / mean of squares.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor
    kind: SpreadKind = "std"

    @classmethod
    def over(cls, values: Tensor, mask: Tensor, kind: SpreadKind = "std") -> Self:
        """The spread of `values` [N] where `mask` [N] bool."""
        chosen = torch.where(mask, values.detach().to(torch.float64), 0.0)
        count = mask.sum(dtype=torch.float64)
        mean = chosen.sum() / count.clamp(min=1)
        squares = torch.where(mask, (chosen - mean).square(), 0.0).sum()
        return cls(count, mean, squares, kind)

    def __add__(self, other: "Spread") -> Self:
        count = self.count + other.count
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count.clamp(min=1)
        squares = self.squares + other.squares + gap.square() * self.count * other.count / count.clamp(min=1)
        return type(self)(count, mean, squares, self.kind)

    @property
    def value(self) -> float:
        """The statistic; NaN without values, 0 for the sample std of a single value."""
        count = float(self.count)
        mean = float(self.mean)
        squares = float(self.squares)
        if count == 0:
            return math.nan
        if self.kind == "effective_sample_size":
            second_moment = mean * mean + squares / count
            if not second_moment > 0:
                return math.nan
            return mean * mean / second_moment
        if self.kind == "sample_std":
            count = max(count - 1, 1)
        return float((squares / count) ** 0.5)


@dataclass(frozen=True)
class Quantile:
    """An exact quantile, linearly interpolated. It keeps all values.

    Args:
        values: [n] float64, detached, in any order.
        q: in [0, 1].
    """

    values: Tensor
    q: float

    def __add__(self, other: "Quantile") -> Self:
        return type(self)(torch.cat([self.values, other.values]), self.q)

    @property
    def value(self) -> float:
        """The quantile; NaN without values."""
        if not len(self.values):
            return math.nan
        position = self.q * (len(self.values) - 1)
        ordered = self.values.sort().values
        low = int(position)
        high = min(low + 1, len(self.values) - 1)
        return float(torch.lerp(ordered[low], ordered[high], position - low))


@dataclass(frozen=True)
class QuantileSketch:
    """A quantile of exp(x), from a histogram of x whose size does not depend on the number of values.

    Args:
        counts: [2 BINS] float64, detached: of x < 0 by falling |x|, then of x >= 0 by rising |x|. |x| has bins of 1 %
            from 1e-7 to 20; smaller or larger values fall in the first or last bin.
        q: in [0, 1].
    """

    counts: Tensor
    q: float
    BINS: ClassVar[int] = 1922  # ceil(log(20 / 1e-7) / log(1.01)) + 1
    SMALLEST: ClassVar[float] = 1e-7

    @classmethod
    def histogram(cls, values: Tensor) -> Tensor:
        """The counts of `values` [n], without NaN, which several quantiles may share."""
        times_smallest = (values.detach().abs().double() / cls.SMALLEST).clamp(min=1)
        size = times_smallest.log().div(math.log(1.01)).round()
        index = size.clamp(max=cls.BINS - 1).long()
        index = torch.where(values < 0, cls.BINS - 1 - index, cls.BINS + index)
        counts = torch.zeros(2 * cls.BINS, dtype=torch.float64, device=values.device)
        return counts.index_add(0, index, torch.ones_like(index, dtype=torch.float64))

    def __add__(self, other: "QuantileSketch") -> Self:
        return type(self)(self.counts + other.counts, self.q)

    @property
    def value(self) -> float:
        """The quantile of exp(x), without interpolation; NaN without values (which costs a device sync)."""
        running = self.counts.cumsum(0)
        total = float(running[-1])
        if total == 0:
            return math.nan
        index = int(torch.searchsorted(running, self.q * (total - 1), right=True))
        if index >= self.BINS:
            return math.exp(self._magnitude(index - self.BINS))
        return math.exp(-self._magnitude(self.BINS - 1 - index))

    def _magnitude(self, size: int) -> float:
        """|x| in the bin of this number."""
        return 0.0 if size == 0 else self.SMALLEST * 1.01**size


Metrics = dict[str, SumCount | Peak | Spread | Quantile | QuantileSketch]


def merge_metrics(parts: list[Metrics]) -> Metrics:
    """One dictionary for all parts, which may differ in their keys. Nothing checks that the values under a key are of
    the same kind, or quantiles of the same share: their names must tell them apart."""
    out: Metrics = {}
    for part in parts:
        for key, value in part.items():
            if key in out:
                out[key] = out[key] + value  # type: ignore[operator]  # same key, same kind
            else:
                out[key] = value
    return out


def on_host(metrics: Metrics) -> Metrics:
    """The metrics with their tensors on the host, by one copy: no `value` then costs a device sync."""
    there: list[Tensor] = []
    for metric in metrics.values():
        held = [getattr(metric, each.name) for each in fields(metric)]
        there += [value for value in held if isinstance(value, Tensor) and value.device.type != "cpu"]
    if not there:
        return metrics
    joined = torch.cat([tensor.detach().flatten() for tensor in there]).cpu()
    parts = joined.split([tensor.numel() for tensor in there])
    copies = {id(tensor): part.view(tensor.shape) for tensor, part in zip(there, parts, strict=True)}

    out: Metrics = {}
    for name, metric in metrics.items():
        copied: dict[str, Any] = {}
        for each in fields(metric):
            value = getattr(metric, each.name)
            copied[each.name] = copies.get(id(value), value)
        out[name] = replace(metric, **copied)
    return out


def k2(log_ratio: Tensor) -> Tensor:
    """Biased, low variance, ≥ 0: ½ log_ratio², with `log_ratio` = log q − log p on samples of p. [N] → [N], nats."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """Unbiased and ≥ 0: exp(log_ratio) − 1 − log_ratio, with `log_ratio` = log q − log p on samples of p. [N] → [N],
    nats. Not clamped. Source: Schulman, "Approximating KL divergence", 2020."""
    return torch.expm1(log_ratio) - log_ratio
