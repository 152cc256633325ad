"""Means over seeds with Student's intervals, for two to five seeds; medians; running means."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True)
class SeedMean:
    """A mean over `n` seeds, and the values in their order; `half` is half the 95 % interval, `t_{n-1} s / sqrt(n)`,
    None for a single value."""

    mean: float
    half: float | None
    n: int
    values: tuple[float, ...] = field(default=(), compare=False)

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)


def mean_over_seeds(values: Sequence[float | None]) -> SeedMean | None:
    """Mean and 95 % t interval of the finite values; None without any.

    half = t_{n-1, 0.975} s / sqrt(n)        s with n - 1 in its denominator
    """
    finite = tuple(value for value in values if value is not None and math.isfinite(value))
    n = len(finite)
    if n < 2:
        return SeedMean(finite[0], None, 1, finite) if finite else None
    half = t_quantile(0.975, n - 1) * (statistics.stdev(finite) / math.sqrt(n))
    return SeedMean(statistics.fmean(finite), half, n, finite)


@lru_cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t with `freedom` degrees of freedom at `probability` in (0.5, 1); found by
    bisection, to 1e-12.

    Source: Abramowitz & Stegun 26.7.3 and 26.7.4, the finite series for whole degrees of freedom.
    """
    low, high = 0.0, 1.0
    while _central(high, freedom) < 2 * probability - 1:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, freedom) < 2 * probability - 1 else (low, middle)
    return (low + high) / 2


def _central(t: float, freedom: int) -> float:
    """Return the probability that |T| < t."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2 == 1
    if freedom == 1:
        return 2 * angle / math.pi
    term = total = cosine if odd else 1.0
    for k in range(3 if odd else 2, freedom - 1, 2):  # odd: 2/3, 4/5 …; even: 1/2, 3/4 …
        term *= (k - 1) / k * cosine * cosine
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def determined_median(values: Sequence[float], n: int) -> float | None:
    """Return the median of `n` values of which only `values` are known; None if it depends on the others, which may be
    anything from 0 to infinity."""
    if not values:
        return None
    middle: set[float] = set()
    for other in (0.0, math.inf):
        ordered = sorted([*values, *[other] * (n - len(values))])
        middle.update(ordered[(n - 1) // 2 : n // 2 + 1])
    if len(middle) == 1:
        return middle.pop()
    return statistics.median(values) if len(values) == n and max(middle) < math.inf else None


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the running mean over a tenth of the values around each, at least three, fewer at both ends; fewer than 12
    values unchanged."""
    if len(values) < 12:
        return list(values)
    half = max(1, len(values) // 20)
    return [statistics.fmean(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))]
