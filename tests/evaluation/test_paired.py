"""Paired tests against published p-values and against every sign there is."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.evaluation.question_pairs import _by_flips, difference, mcnemar, paired_score, sign_flip


@pytest.mark.parametrize(
    ("won", "lost", "p"),
    [
        (16, 6, 0.052478790283203125),  # R exact2x2: mcnemar.exact(matrix(c(59, 6, 16, 80), 2)), p-value = 0.05248
        (6, 16, 0.052478790283203125),
        (19, 2, 0.00022125244140625),  # 2 (C(21,0) + C(21,1) + C(21,2)) / 2^21
        (5, 0, 0.0625),
        (6, 0, 0.03125),
        (3, 3, 1.0),
        (0, 0, 1.0),
    ],
)
def test_mcnemar(won, lost, p):
    assert mcnemar(won, lost) == pytest.approx(p, rel=1e-12)


@pytest.mark.slow
def test_mcnemar_of_thousands():
    assert 0 < mcnemar(3000, 2000) < 1e-40
    with pytest.raises(ValueError, match="lost=-1 must be >= 0"):
        mcnemar(1, -1)


def by_enumeration(differences):
    seen = abs(sum(differences))
    sums = [abs(sum(signed)) for signed in product(*((d, -d) for d in differences))]
    return sum(total >= seen - 1e-9 for total in sums) / len(sums)


@pytest.mark.slow
@given(st.lists(st.integers(-4, 4).map(lambda i: i / 4), min_size=1, max_size=8))
def test_sign_flips_are_all_signs(differences):
    assert sign_flip(differences) == pytest.approx(by_enumeration(differences), abs=1e-12)


@pytest.mark.slow
@given(st.lists(st.sampled_from([0.0, 1 / 3, -1 / 3, 0.5, 2 / 7, -1.0]), min_size=1, max_size=8))
def test_shares_of_unequal_numbers_of_samples(differences):
    assert sign_flip(differences) == pytest.approx(by_enumeration(differences), abs=1e-12)


def test_monte_carlo_agrees_where_the_exact_way_is_closed():
    differences = [0.25, -0.5, 0.75, 0.25, 0.5, -0.25, 0.5, 0.75]
    exact = by_enumeration(differences)
    assert _by_flips(np.asarray(differences), 0) == pytest.approx(exact, abs=0.006)
    noise = [d + 1e-7 * 3**i for i, d in enumerate(differences)]  # no fractions any more
    assert sign_flip(noise, seed=1) == sign_flip(noise, seed=1) == pytest.approx(exact, abs=0.1)


def test_a_p_value_by_flips_is_never_zero():
    """The signs that were observed are one of the flips: none of 100,000 others is as far, and p is 1 / 100,001."""
    assert sign_flip([math.sqrt(i) for i in range(2, 80)]) == 1 / 100_001


OUTCOMES = [(0, 0, 200), (3, 1, 200), (12, 2, 14), (5, 0, 100), (0, 9, 54), (1, 0, 1), (7, 7, 30), (40, 25, 1000)]


@pytest.mark.parametrize(("won", "lost", "n"), OUTCOMES)
def test_a_bound_is_where_the_score_test_turns(won, lost, n):
    """At a bound D the statistic is ±z, with the variance under D from a likelihood that is maximised by searching."""

    def statistic(d):
        def likelihood(q):  # of (share won, lost, the same) = (q + d, q, 1 - d - 2 q)
            shares = ((won, q + d), (lost, q), (n - won - lost, 1 - d - 2 * q))
            return sum(k * math.log(max(p, 1e-300)) for k, p in shares)

        low, high = max(0.0, -d), (1 - d) / 2
        for _ in range(200):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            low, high = (low, b) if likelihood(a) >= likelihood(b) else (a, high)
        return (won - lost - n * d) / math.sqrt(n * (2 * low + d - d * d))

    low, high = paired_score(won, lost, n)
    assert -1 <= low < (won - lost) / n <= high <= 1
    for bound, z in ((low, 1.959964), (high, -1.959964)):
        assert abs(bound) == 1 or statistic(bound) == pytest.approx(z, abs=1e-4)
    assert paired_score(lost, won, n) == (-high, -low)


def test_single_answers_take_the_score_interval():
    few = [1.0] * 3 + [-1.0] + [0.0] * 196
    interval = difference(few, single=True)
    assert (interval.method, interval.value, (interval.low, interval.high)) == ("score", 0.01, paired_score(3, 1, 200))
    assert difference(few).method == "bootstrap" and difference(few).high < interval.high
    with pytest.raises(ValueError, match="must be -1, 0 or 1 for single answers"):
        difference([0.5], single=True)
    for bad in ((-1, 0, 3), (0, -1, 3), (2, 2, 3), (0, 0, 0)):
        with pytest.raises(ValueError, match="must be >= "):
            paired_score(*bad)


def test_nothing_differs():
    assert sign_flip([0.0] * 5) == 1.0
    assert difference([0.0] * 200).value == 0.0 and difference([0.0] * 200).high == pytest.approx(0.01885, abs=1e-5)


def test_the_interval_of_the_difference_uses_the_pairs():
    """Two models at .5 on 100 questions, B right on five more and A on none: totals would not tell them apart, the
    pairs nearly do."""
    interval = difference([1.0] * 5 + [0.0] * 95)
    assert interval.value == pytest.approx(0.05) and 0 < interval.low < 0.03 and 0.09 < interval.high < 0.13
