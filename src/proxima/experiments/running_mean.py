"""Running means of a curve."""

import statistics
from collections.abc import Sequence


def running_mean(values: Sequence[float | None]) -> list[float | None]:
    """Return for each value the mean over a tenth of the values around it: at least three, fewer at both ends. None
    values are left out of the means, and stay None."""
    half = max(1, len(values) // 20)
    near = ([v for v in values[max(i - half, 0) : i + half + 1] if v is not None] for i in range(len(values)))
    return [None if value is None else statistics.fmean(v) for value, v in zip(values, near, strict=True)]


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """The running mean; fewer than 12 values are returned unchanged."""
    return running_mean(values) if len(values) >= 12 else list(values)
