"""Paired tests of two results on the same questions: is the difference due to chance?

Both tests have the same null hypothesis: for each question a fair coin decides which side gets which result. Both are
exact and need no seed; Monte Carlo is used only where the exact sums are too many, or values are no simple fractions.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from proxima.data import require
from proxima.data.random import random_bits
from proxima.evaluation.intervals import Interval, Z, bootstrap_mean

MOST_STATES = 1_000_000  # sums that the exact distribution may range over
FLIPS = 100_000  # of the Monte Carlo test
_DENOMINATOR = 10**6


def mcnemar(won: int, lost: int) -> float:
    """McNemar's exact test for one answer per question on each side: two-sided p from the questions that exactly one
    side has right.

        p = min(1, 2 P(X <= min(won, lost))),  X ~ Binomial(won + lost, 1/2)

    Args:
        won, lost: questions that only the second, and only the first, has right. Questions that both have right, or
            wrong, carry no information.
    Returns: the p-value; 1 if the sides do not differ.
    Raises: ValueError for a negative count.
    Source: McNemar, Psychometrika 12 (1947) 153, in its exact binomial form.
    Edge cases: the smallest p with d differing questions is 2^(1-d): five all one way are not yet significant at .05.
    """
    require(won >= 0, "won", won, "must be >= 0")
    require(lost >= 0, "lost", lost, "must be >= 0")
    total = won + lost
    tail = sum(math.comb(total, i) for i in range(min(won, lost) + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2**total)))


def sign_flip(differences: Sequence[float], *, seed: int = 0) -> float:
    """The paired permutation test for means of several samples: two-sided p of the mean difference under random signs.

        p = P(|Σ s_i d_i| >= |Σ d_i|),  s_i = ±1 with probability 1/2 each

    Args:
        differences: d_i of each question, second minus first; shares of few samples, so fractions with small
            denominators.
        seed: of the flips if the exact test is too large (see Differs).
    Returns: the p-value; 1 if no question differs. For d_i in {-1, 0, 1} it is McNemar's exact p.
    Source: Fisher, The Design of Experiments (1935), section 21.
    Differs: the usual test is by Monte Carlo. Here the d_i are brought to a common denominator and the distribution of
        the sum is built question by question, exactly up to float64. If that takes over a million sums, or the values
        are no such fractions (means of rewards), 100,000 seeded flips are used: p = (1 + flips with a sum at least as
        far from 0) / (1 + flips).
    """
    differing = [d for d in differences if abs(d) > 1e-12]
    if not differing:
        return 1.0
    steps = _as_integers(differing)
    if steps is None or 2 * sum(map(abs, steps)) + 1 > MOST_STATES:
        return _by_flips(np.asarray(differing), seed)
    reach = sum(map(abs, steps))
    chance = np.zeros(2 * reach + 1)
    chance[reach] = 1.0
    for step in sorted(map(abs, steps)):
        # nothing reaches the ends before the last step: no wrap
        chance = 0.5 * (np.roll(chance, step) + np.roll(chance, -step))
    far = abs(sum(steps))
    away = np.abs(np.arange(-reach, reach + 1))
    return float(min(1.0, chance[away >= far].sum()))


def difference(differences: Sequence[float], *, single: bool = False, shares: bool = True, seed: int = 0) -> Interval:
    """The mean difference with its 95 % interval: BCa bootstrap over the questions, each with both its results.

    Args:
        differences: second minus first, per question.
        single: one answer per question on both sides, so that each is -1, 0 or 1: Tango's score interval, which keeps
            its 95 % even if few questions differ (`paired_score`).
        shares: the differences are in [-1, 1]; False for rewards.
    Raises: ValueError without questions, or if single answers differ by anything other than -1, 0 or 1.
    """
    if single:
        whole = all(d in (-1, 0, 1) for d in differences)
        require(whole, "differences", list(differences), "must be -1, 0 or 1 for single answers")
        won, lost, n = differences.count(1), differences.count(-1), len(differences)
        low, high = paired_score(won, lost, n)
        return Interval(value=(won - lost) / n, low=low, high=high, method="score", questions=n)
    return bootstrap_mean(differences, seed=seed, span=(-1.0, 1.0) if shares else None)


def _as_integers(values: Sequence[float]) -> list[int] | None:
    """Return the numerators over a common denominator; None unless they are fractions with one up to a million."""
    fractions = [Fraction(value).limit_denominator(10_000) for value in values]
    if any(abs(float(fraction) - value) > 1e-12 for fraction, value in zip(fractions, values, strict=True)):
        return None
    common = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * common) for fraction in fractions] if common <= _DENOMINATOR else None


def _by_flips(values: np.ndarray, seed: int) -> float:
    n, far, extreme = len(values), abs(float(values.sum())) * (1 - 1e-12), 0
    rows = max(1, 4_000_000 // n)
    for start in range(0, FLIPS, rows):
        signs = (random_bits(seed, start, min(FLIPS, start + rows), n) & 1).astype(np.float64) * 2 - 1
        extreme += int((np.abs(signs @ values) >= far).sum())
    return (1 + extreme) / (1 + FLIPS)


def paired_score(won: int, lost: int, questions: int) -> tuple[float, float]:
    """Tango's score interval of the difference of two accuracies on the same questions, one answer each, 95 %.

    The bounds are the extreme differences D that a score test just does not reject:

        (won - lost - n D)² = z² n (2 q + D (1 - D))
        q = (sqrt(B² + 8 n c D (1 - D)) - B) / 4n,  B = (2n - won + lost) D - won - lost,  c = lost
        the share lost, given D

    Exact coverage, summed over all outcomes, if neither side is better and a share of the questions is right on one
    side only:

        questions, share    200, .02    200, .05    200, .1    30, .1    1,000, .01
        this                    .958        .957       .948      .969          .957
        BCa bootstrap           .903        .929       .949      .909
        which can only repeat the handful of questions that differ

    Args:
        won, lost: questions that only the second, and only the first, has right.
        questions: n, including those with the same outcome on both sides.
    Returns: the bounds, in [-1, 1]; won = lost = 0: plus and minus z² / (n + z²), the Wilson bound on a share of 0.
    Raises: ValueError for impossible counts.
    Source: Tango, Statistics in Medicine 17 (1998) 891.
    Differs: Newcombe's method 10 (1998) also needs the number of questions that both have right; this one only needs
        those that differ.
    """
    require(won >= 0, "won", won, "must be >= 0")
    require(lost >= 0, "lost", lost, "must be >= 0")
    require(questions >= max(1, won + lost), "questions", questions, f"must be >= 1 and >= won + lost = {won + lost}")
    return -_upper_score(lost, won, questions), _upper_score(won, lost, questions)


def _upper_score(won: int, lost: int, n: int) -> float:
    """The largest D in [(won - lost) / n, 1] that the score test does not reject, by bisection to the last bit."""
    low, high = (won - lost) / n, 1.0
    while low < (middle := (low + high) / 2) < high:
        b = (2 * n - won + lost) * middle - won - lost
        root = math.sqrt(b * b + 8 * n * lost * middle * (1 - middle)) if lost else abs(b)
        variance = n * ((root - b) / (2 * n) + middle * (1 - middle))
        accepted = (won - lost - n * middle) ** 2 <= Z * Z * variance
        low, high = (middle, high) if accepted else (low, middle)
    return high
