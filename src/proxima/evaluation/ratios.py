"""The interval of a mean over the parts of examples."""

import math
from collections.abc import Sequence

import numpy as np

from proxima.data import require
from proxima.evaluation.intervals import Interval, Z


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """A mean over the parts of examples, such as the loss over all tokens, with its interval over the examples.

        R = Σ x_i / Σ y_i      R ± z sqrt(n / (n - 1) Σ (x_i - R y_i)²) / Σ y_i

    Args:
        numerators, denominators: x_i and y_i of each example, Σ y_i > 0.
    Returns: the interval; for a single example the value alone, with method `constant`.
    Source: Cochran, Sampling Techniques (3rd ed., 1977), eq. 6.13, without the correction for a finite population.
    """
    x, y = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    require(len(x) == len(y) >= 1, "denominators", len(y), f"must be as many as the {len(x)} numerators, and not 0")
    require(bool(y.sum() > 0), "denominators", float(y.sum()), "must add up to more than 0")
    ratio, n = float(x.sum() / y.sum()), len(x)
    if n == 1:
        return Interval(value=ratio, low=ratio, high=ratio, method="constant", questions=1)
    half = Z * math.sqrt(n / (n - 1) * float(((x - ratio * y) ** 2).sum())) / float(y.sum())
    return Interval(value=ratio, low=ratio - half, high=ratio + half, method="ratio", questions=n)
