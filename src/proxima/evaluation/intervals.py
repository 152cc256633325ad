"""95 % confidence intervals of metrics, over the questions.

A test set is a sample of all questions that could be in it. Questions are resampled, never single answers, because the
samples of one question are not independent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from proxima.data import require
from proxima.data.random import random_bits

PART = "reward/part/"  # begins the key of one reward of several
Z = 1.959964  # two-sided 95 %
REPLICATES = 10_000
AT_ONCE = 4_000_000  # resampled values in memory at a time
_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value with its 95 % interval, over `questions` questions; `method` is `wilson`, `bootstrap` (BCa over
    questions), `score` (`paired_score`), `ratio` (`ratio_of_sums`), `delong` (`preference_metrics` of labeled
    completions, whose number is `questions`) or `constant` (width 0: the values show no spread)."""

    value: float
    low: float
    high: float
    method: str
    questions: int

    def figures(self, name: str) -> dict[str, float]:
        """Return the value and its bounds as in a record of metrics.jsonl, see `bound_keys`."""
        low, high = bound_keys(name)
        return {name: self.value, low: self.low, high: self.high}


def bound_keys(key: str) -> tuple[str, str]:
    """Return the keys of a metric's interval: `accuracy/low`, `reward/low`, `reward/part_low/<name>`, and `high`."""
    if key.startswith(PART):
        name = key.removeprefix(PART)
        return f"reward/part_low/{name}", f"reward/part_high/{name}"
    stem = key.removesuffix("/mean")
    return f"{stem}/low", f"{stem}/high"


def wilson(correct: float, questions: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share.

        centre = (p + z²/2n) / (1 + z²/n)      half = z sqrt(p(1-p)/n + z²/4n²) / (1 + z²/n)

    Unlike p ± z sqrt(p(1-p)/n), it stays inside [0, 1] and is informative for 0 and for n right answers. Without
    questions: (0, 1).
    Source: Wilson, JASA 22 (1927) 209.
    """
    if questions == 0:
        return 0.0, 1.0
    p = correct / questions
    n = questions
    scale = 1 + Z * Z / n
    centre = (p + Z * Z / (2 * n)) / scale
    half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def wilson_interval(correct: float, questions: int) -> Interval:
    """The share `correct` / `questions` with its Wilson interval; `questions` >= 1."""
    low, high = wilson(correct, questions)
    return Interval(value=correct / questions, low=low, high=high, method="wilson", questions=questions)


def bootstrap_mean(
    values: Sequence[float], *, seed: int = 0, span: tuple[float, float] | None = (0.0, 1.0)
) -> Interval:
    """The mean of a value per question, with its BCa bootstrap interval over the questions.

    The questions are resampled with replacement, `REPLICATES` times; the interval is between two quantiles of the
    resampled means, shifted for bias and skewness (bias-corrected and accelerated):

        z0 = Φ⁻¹(share of replicates below the mean, half of those at it)
        a = Σ(m - m_i)³ / 6 (Σ(m - m_i)²)^1.5, m_i without i
        level → Φ(z0 + (z0 + z) / (1 - a (z0 + z))),  z = Φ⁻¹(level)

    Draws are counter-based (Philox keyed by the seed), so the interval depends only on the values and the seed.

    Args:
        values: a share, a difference of shares, or a reward for each question; n >= 1.
        span: range of the values: (0, 1), (-1, 1) for differences of shares, None for rewards, whose range is unknown.
    Returns: `Interval` of method `bootstrap`. If all values are equal, resampling shows no spread, although the true
        mean may differ; the method is then `wilson`: Wilson's interval with the questions as trials, whose variance is
        the largest of all values in [0, 1] with that mean, or for differences, all 0 in practice, ± the Wilson bound on
        the share of questions that differ. Without a span no such bound exists: method `constant`, of width 0.
    Raises: ValueError without values.
    Source: Efron, JASA 82 (1987) 171; the jackknife's acceleration as in Efron and Tibshirani (1993), Eq. 14.15.
    """
    require(len(values) >= 1, "values", list(values), "must hold at least one question")
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    mean = float(x.mean())
    if float(np.ptp(x)) < 1e-12:
        return _without_spread(mean, n, span)
    means = np.sort(resampled_means(x, seed, REPLICATES))
    below = float(np.searchsorted(means, mean - 1e-12)) + float(np.searchsorted(means, mean + 1e-12))
    least = 0.5 / REPLICATES
    z0 = _NORMAL.inv_cdf(min(max(below / (2 * REPLICATES), least), 1 - least))
    away = x - mean  # (n - 1) (m - m_i)
    skew = float((away**3).sum()) / (6 * float((away**2).sum()) ** 1.5)
    low = _quantile(means, _level((1 - 0.95) / 2, z0, skew))
    high = _quantile(means, _level((1 + 0.95) / 2, z0, skew))
    return Interval(value=mean, low=min(low, mean), high=max(high, mean), method="bootstrap", questions=n)


def resampled_means(x: np.ndarray, seed: int, replicates: int) -> np.ndarray:
    """[replicates] the mean of n values drawn with replacement from `x` [n], each replicate from its own counter."""
    n = len(x)
    out = np.empty(replicates)
    for start in range(0, replicates, max(1, AT_ONCE // n)):
        stop = min(replicates, start + max(1, AT_ONCE // n))
        out[start:stop] = x[resampled_indices(seed, start, stop, n)].mean(axis=1)
    return out


def resampled_indices(seed: int, start: int, stop: int, n: int) -> np.ndarray:
    """[stop - start, n] indices below n, drawn with replacement for the replicates `start` to `stop`. The probabilities
    of two indices differ by at most 2⁻³², which is negligible."""
    bits = random_bits(seed, start, stop, n).astype(np.uint64)
    scaled: np.ndarray = (bits * np.uint64(n)) >> np.uint64(32)
    return scaled.astype(np.int64)


def _without_spread(mean: float, n: int, span: tuple[float, float] | None) -> Interval:
    if span is None:
        return Interval(value=mean, low=mean, high=mean, method="constant", questions=n)
    if span[0] < 0:
        width = wilson(0, n)[1]
        low = max(-1.0, mean - width)
        high = min(1.0, mean + width)
        return Interval(value=mean, low=low, high=high, method="wilson", questions=n)
    return replace(wilson_interval(mean * n, n), value=mean)


def _level(p: float, z0: float, skew: float) -> float:
    z = _NORMAL.inv_cdf(p)
    return _NORMAL.cdf(z0 + (z0 + z) / (1 - skew * (z0 + z)))


def _quantile(ordered: np.ndarray, level: float) -> float:
    """Interpolate linearly between the order statistics, independent of a library's definition of a quantile."""
    place = min(max(level, 0.0), 1.0) * (len(ordered) - 1)
    left = math.floor(place)
    right = min(left + 1, len(ordered) - 1)
    return float(ordered[left] + (place - left) * (ordered[right] - ordered[left]))


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """A mean over all parts of the examples, such as the loss over all tokens, with its interval over the examples.

        R = Σ x_i / Σ y_i      R ± z sqrt(n / (n - 1) Σ (x_i - R y_i)²) / Σ y_i

    Args:
        numerators, denominators: x_i and y_i of each example, Σ y_i > 0.
    Returns: the interval, of method `ratio`; for a single example of width 0, with method `constant`.
    Raises: ValueError if the lengths differ, or Σ y_i is not > 0.
    Source: Cochran, Sampling Techniques (3rd ed., 1977), eq. 6.13, without the correction for a finite population.
    """
    x = np.asarray(numerators, np.float64)
    y = np.asarray(denominators, np.float64)
    require(len(x) == len(y) >= 1, "denominators", len(y), f"must be as many as the {len(x)} numerators, and not 0")
    require(bool(y.sum() > 0), "denominators", float(y.sum()), "must add up to more than 0")
    ratio = float(x.sum() / y.sum())
    n = len(x)
    if n == 1:
        return Interval(value=ratio, low=ratio, high=ratio, method="constant", questions=1)
    squares = float(((x - ratio * y) ** 2).sum())
    half = Z * math.sqrt(n / (n - 1) * squares) / float(y.sum())
    return Interval(value=ratio, low=ratio - half, high=ratio + half, method="ratio", questions=n)
