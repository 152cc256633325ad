"""mean@k, pass@k, maj@k against published and hand-computed values, and against every subset there is."""

from fractions import Fraction
from itertools import combinations, product
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.evaluation.estimators import maj_at_k, mean_at_k, pass_at_k


def test_mean_is_the_share_of_right_samples():
    assert mean_at_k([True, False, False, True]) == 0.5
    with pytest.raises(ValueError, match="correct=\\[\\] must hold at least one sample"):
        mean_at_k([])


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n):
    for c, k in product(range(n + 1), range(1, n + 1)):
        subsets = list(combinations([i < c for i in range(n)], k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_many_samples_is_stable():
    """The quotient of binomials, in exact integers; 200 samples are what arXiv 2107.03374 drew."""
    for c, k in ((1, 1), (1, 100), (10, 10), (13, 100), (199, 1), (200, 200)):
        exact = 1 - Fraction(comb(200 - c, k), comb(200, k))
        assert pass_at_k(200, c, k) == pytest.approx(float(exact), rel=1e-12)
    assert pass_at_k(200, 10, 10) == pytest.approx(0.408547866, abs=1e-9)
    assert pass_at_k(100_000, 3, 50_000) == pytest.approx(0.875, abs=1e-4)


@pytest.mark.parametrize(
    ("n", "c", "k", "said"),
    [
        (4, 1, 5, "k=5 must be in 1 … n=4; draw more samples, or ask for a smaller k"),
        (4, 1, 0, "k=0 must be in 1 … n=4"),
        (4, 5, 1, "c=5 must be in 0 … n=4"),
        (0, 0, 1, "n=0 must be >= 1"),
    ],
)
def test_pass_at_k_refuses(n, c, k, said):
    with pytest.raises(ValueError, match=said):
        pass_at_k(n, c, k)


def by_enumeration(answers, correct, k):
    """The definition, word for word: every subset, every way to break a tie."""
    names = {a for a, right in zip(answers, correct, strict=True) if right and a is not None}
    classes = ["right" if right or a in names else a for a, right in zip(answers, correct, strict=True)]
    members = [right for entry, right in zip(classes, correct, strict=True) if entry == "right"]
    value = sum(members) / len(members) if members else 0.0
    total = 0.0
    subsets = list(combinations(classes, k))
    for subset in subsets:
        votes = {entry: subset.count(entry) for entry in subset if entry is not None}
        if votes:
            best = [entry for entry, number in votes.items() if number == max(votes.values())]
            total += sum(value for entry in best if entry == "right") / len(best)
    return total / len(subsets)


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), min_size=1, max_size=7))
def test_majority_equals_the_enumeration(samples):
    answers, correct = [a for a, _ in samples], [right for _, right in samples]
    for k in range(1, len(samples) + 1):
        assert maj_at_k(answers, correct, k) == pytest.approx(by_enumeration(answers, correct, k), abs=1e-12)


def test_majority_of_many_samples_is_a_probability_and_grows_with_k():
    answers = ["1"] * 24 + [str(i) for i in range(2, 18)] * 2 + [None] * 8
    correct = [answer == "1" for answer in answers]
    values = [maj_at_k(answers, correct, k) for k in (1, 4, 16, 64)]
    assert values[0] == pytest.approx(24 / 64) and values[-1] == 1.0
    assert values == sorted(values) and 0.375 < values[1] < values[2] < 1.0


def test_majority_refuses():
    with pytest.raises(ValueError, match="k=3 must be in 1 … n=2"):
        maj_at_k(["a", "b"], [True, False], 3)
    with pytest.raises(ValueError, match="correct=1 must be as many as answers"):
        maj_at_k(["a", "b"], [True], 1)
    with pytest.raises(ValueError, match="k=5 must be n=1200, or n at most 1,000"):
        maj_at_k(["a"] * 1200, [True] * 1200, 5)
