"""Intervals against published values, exact bootstrap distributions, and their own coverage."""

import math
from itertools import product

import numpy as np
import pytest

from proxima.data.random import random_bits
from proxima.evaluation.intervals import _quantile, bootstrap_mean, ratio_of_sums, resampled_means, wilson


@pytest.mark.parametrize(("correct", "questions"), [(25, 200), (188, 200), (1, 3), (499, 1000)])
def test_wilson_is_where_the_score_test_turns(correct, questions):
    """Its definition: the bounds are the shares that the observation is just 1.959964 of *their* standard errors away
    from."""
    share = correct / questions
    low, high = wilson(correct, questions)
    assert low < share < high
    for bound in (low, high):
        assert abs(share - bound) / math.sqrt(bound * (1 - bound) / questions) == pytest.approx(1.959964, abs=1e-9)


def test_wilson_at_the_ends():
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-7)  # R: prop.test(0, 10, correct = FALSE)
    assert wilson(10, 10) == pytest.approx((0.7224672, 1.0), abs=1e-7)
    assert wilson(0, 0) == (0.0, 1.0)


def test_resampling_is_the_bootstrap():
    """Four questions have 4^4 resamples: the seeded means have their mean and their distribution."""
    x = np.array([0.0, 0.25, 0.25, 1.0])
    every = np.array([np.mean(draw) for draw in product(x, repeat=4)])
    means = resampled_means(x, seed=7, replicates=40_000)
    assert means.mean() == pytest.approx(every.mean(), abs=4 * every.std() / 200)
    for level in (0.125, 0.25, 0.375, 0.5, 0.75):
        assert (means <= level).mean() == pytest.approx((every <= level).mean(), abs=0.01)


def test_draws_are_by_counter():
    """A replicate depends on the seed and its number alone, not on how many are made at once."""
    whole = random_bits(3, 0, 10, 13)
    assert (random_bits(3, 4, 9, 13) == whole[4:9]).all() and not (random_bits(4, 0, 10, 13) == whole).any(axis=1).all()
    values = [i % 3 / 2 for i in range(40)]
    assert bootstrap_mean(values, seed=5) == bootstrap_mean(values, seed=5)
    assert (resampled_means(np.array(values), 5, 50) != resampled_means(np.array(values), 6, 50)).mean() > 0.5


@pytest.mark.slow
def test_symmetric_values_have_a_percentile_interval():
    """Without skewness and bias, BCa is the plain percentile interval; near the normal one for many questions."""
    values = [0.0, 1.0] * 200
    interval = bootstrap_mean(values)
    assert interval.value == 0.5 and interval.method == "bootstrap" and interval.questions == 400
    half = 1.959964 * 0.5 / 20
    assert (interval.low, interval.high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.004)


def test_skewed_values_move_the_interval():
    """Few questions with a large value: the upper arm is the longer one, as it has to be."""
    interval = bootstrap_mean([1.0] * 4 + [0.0] * 36)
    assert interval.value - interval.low < interval.high - interval.value
    means = np.sort(resampled_means(np.array([1.0] * 4 + [0.0] * 36), 0, 10_000))
    assert interval.high > _quantile(means, 0.975)  # the percentile interval misses it
    assert bootstrap_mean([0.0, 0.0, 0.0, 1.0]).high == 1.0  # shifted for bias; the other way it would be .75


def test_no_spread_is_no_certainty():
    none, all_, halves = bootstrap_mean([0.0] * 30), bootstrap_mean([1.0] * 30), bootstrap_mean([0.5] * 30)
    assert (none.method, none.low, none.high) == ("wilson", 0.0, pytest.approx(0.11351, abs=1e-5))
    assert (all_.low, all_.high) == (pytest.approx(0.88649, abs=1e-5), 1.0)
    assert halves.low == pytest.approx(0.33154, abs=1e-4) and halves.value == 0.5
    same = bootstrap_mean([0.0] * 30, span=(-1.0, 1.0))
    assert (same.low, same.high) == (-none.high, none.high)
    better = bootstrap_mean([1.0] * 30, span=(-1.0, 1.0))
    assert (better.low, better.high) == (pytest.approx(1 - none.high), 1.0)


@pytest.mark.parametrize(
    ("level", "value"), [(0.0, 0.0), (1 / 6, 0.5), (0.5, 2.0), (5 / 6, 6.5), (1.0, 10.0), (-1, 0.0), (2, 10.0)]
)
def test_a_quantile_is_between_its_two_neighbours(level, value):
    assert _quantile(np.array([0.0, 1.0, 3.0, 10.0]), level) == pytest.approx(value)


def test_one_question_and_none():
    assert bootstrap_mean([1.0]).low == pytest.approx(0.2065, abs=1e-4)
    with pytest.raises(ValueError, match="values=\\[\\] must hold at least one question"):
        bootstrap_mean([])


def test_a_ratio_of_sums_by_hand():
    """Examples of 1, 2 and 3 tokens with 2, 2 and 6 nats: R = 10/6, and residuals of 1/3, -4/3 and 1."""
    interval = ratio_of_sums([2, 2, 6], [1, 2, 3])
    half = 1.959964 * math.sqrt(1.5 * 26 / 9) / 6
    assert (interval.value, interval.low, interval.high) == pytest.approx((10 / 6, 10 / 6 - half, 10 / 6 + half))
    assert ratio_of_sums([3], [2]).low == ratio_of_sums([3], [2]).high == 1.5
    with pytest.raises(ValueError, match="must add up to more than 0"):
        ratio_of_sums([0, 0], [0, 0])
