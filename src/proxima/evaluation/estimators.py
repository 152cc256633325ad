"""Estimators for one question with n samples: exact expectations over all C(n, k) subsets of k samples.

An estimate at k < n uses every sample and therefore has the least variance; nothing is drawn at random.
"""

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np

from proxima.data import require


def mean_at_k(correct: Sequence[bool]) -> float:
    """The share of right samples, which is mean@k for every k <= n.

    Args:
        correct: whether each of the n samples is right, n >= 1.
    Returns: a share in [0, 1]; the unbiased estimate of the probability that one sample is right.
    Raises: ValueError without samples.
    Source: avg@k, as DAPO (arXiv 2503.14476) reports AIME as avg@32.
    """
    require(len(correct) >= 1, "correct", list(correct), "must hold at least one sample")
    return sum(map(bool, correct)) / len(correct)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of k samples is right, unbiased, from c right ones among n.

        1 - C(n - c, k) / C(n, k)  =  1 - prod_{i = n-c+1}^{n} (1 - k / i)

    Args:
        n: samples drawn. c: right ones among them, 0 <= c <= n. k: samples allowed, 1 <= k <= n.
    Returns: a probability; 1 where fewer than k samples are wrong, c / n at k = 1.
    Raises: ValueError naming the value and its bound.
    Source: Chen et al., arXiv 2107.03374, Eq. 1 and the product form of their Figure 3.
    Differs: 1 - (1 - c/n)^k, which many scripts compute, is too low on average (their Appendix A): by .15 for k = n = 4
        if a sample is right with probability 1/4.
    """
    require(n >= 1, "n", n, "must be >= 1")
    require(0 <= c <= n, "c", c, f"must be in 0 … n={n}")
    require(1 <= k <= n, "k", k, f"must be in 1 … n={n}; draw more samples, or ask for a smaller k")
    if n - c < k:
        return 1.0
    missed = 1.0
    for i in range(n - c + 1, n + 1):
        missed *= 1 - k / i
    return 1 - missed


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """The probability that the answer with the most votes among k samples is right: the expectation over the C(n, k)
    subsets, and over ties.

    Samples vote for their answer; None does not vote. The answers of right samples form one class, however they are
    written (the reward decides that 1/2 equals 0.5); other answers form classes by equality. Ties are broken by a fair
    draw, in expectation: each of t + 1 tied classes wins with probability 1 / (t + 1). A winning class counts with its
    share of right samples, which is 0 or 1 unless the reward judges more than the answer. Without any vote: 0.

        sum over classes j, votes v of   value_j C(n_j, v) sum_t W_j(v, t) / (t + 1)  /  C(n, k)

    where W_j(v, t) counts the ways to draw the other k - v samples so that no class has more than v votes and t others
    have exactly v.

    Args:
        answers: the canonical answer of each of the n samples (see `votes`), None without an answer.
        correct: whether each sample is right; a right sample without an answer votes for the right class.
        k: samples that vote, 1 <= k <= n.
    Returns: a probability. k = 1 gives the share of right samples.
    Raises: ValueError for k out of bounds, lengths that differ, or k < n > 1,000, where float64 can't count the ways.
    Source: Wang et al., arXiv 2203.11171 (self-consistency), where k samples are drawn once; here the expectation is
        computed by counting.
    Differs: verl draws subsets with replacement by a global seed, lm-evaluation-harness takes the first k; in both the
        first of tied answers wins, and an answer that could not be extracted votes like any other.
    """
    n = len(answers)
    require(n == len(correct), "correct", len(correct), f"must be as many as answers ({n})")
    require(1 <= k <= n, "k", k, f"must be in 1 … n={n}; draw more samples, or ask for a smaller k")
    require(n <= 1000 or k == n, "k", k, f"must be n={n}, or n at most 1,000")
    right, wrong, silent, value = _classes(answers, correct)
    if not right:
        return 0.0
    return value * _right_wins(right, tuple(sorted(wrong)), silent, k)


def _classes(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> tuple[int, list[int], int, float]:
    """Return the votes for the right class and for each wrong one, the number of samples without a vote, and the share
    of right samples in the right class."""
    right_answers = {answer for answer, right in zip(answers, correct, strict=True) if right and answer is not None}
    for_right = 0
    voted = 0
    silent = 0
    wrong: dict[Hashable, int] = {}
    for answer, right in zip(answers, correct, strict=True):
        if right or answer in right_answers:
            for_right += 1
            voted += bool(right)
        elif answer is None:
            silent += 1
        else:
            wrong[answer] = wrong.get(answer, 0) + 1
    share = voted / for_right if for_right else 0.0
    return for_right, list(wrong.values()), silent, share


@lru_cache(maxsize=65536)
def _right_wins(right: int, wrong: tuple[int, ...], silent: int, k: int) -> float:
    """The probability that the class with `right` votes wins among k samples, drawn from all classes and the samples
    without a vote."""
    n = right + sum(wrong) + silent
    if not wrong:  # it wins as soon as it has one vote
        return 1 - math.comb(silent, k) / math.comb(n, k)
    if k == n:  # all samples vote
        most = max(wrong)
        if right < most:
            return 0.0
        if right > most:
            return 1.0
        return 1 / (1 + wrong.count(most))
    total = 0.0
    for votes in range(1, min(right, k) + 1):
        ways = _others(wrong, silent, votes, k - votes)
        total += math.comb(right, votes) * sum(float(count) / (ties + 1) for ties, count in enumerate(ways))
    return min(1.0, total / math.comb(n, k))


def _others(wrong: tuple[int, ...], silent: int, votes: int, left: int) -> np.ndarray:
    """[ties] the ways to draw `left` samples with at most `votes` of each wrong class, by the number of classes with
    exactly `votes`.

    A product of polynomials in drawn samples and ties, one per class. All terms are positive, so float64 is precise
    enough; its range suffices for n up to about 1,000.
    """
    most_ties = min(len(wrong), left // votes)
    ways = np.zeros((most_ties + 1, left + 1))
    ways[0] = [float(math.comb(silent, drawn)) for drawn in range(left + 1)]
    for size in wrong:
        grown = ways.copy()  # no sample drawn from this class
        for drawn in range(1, min(size, votes, left) + 1):
            factor = float(math.comb(size, drawn))
            if drawn < votes:
                grown[:, drawn:] += factor * ways[:, : left + 1 - drawn]
            else:
                grown[1:, drawn:] += factor * ways[:-1, : left + 1 - drawn]
        ways = grown
    by_ties: np.ndarray = ways[:, left]
    return by_ties


def powers_of_two(samples: int) -> tuple[int, ...]:
    """Return 1, 2, 4 … up to `samples`, and `samples` itself."""

    return tuple(sorted({1 << i for i in range(samples.bit_length()) if 1 << i <= samples} | {samples}))
