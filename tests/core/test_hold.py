"""A trust region that holds itself: the rule by hand, its ends, and that it finds the bound it is meant to find."""

import math

import numpy as np
import pytest
import torch

from proxima.core import Importance, PpoClip, TokenMean, policy_loss
from proxima.core.hold import DRIFT, FACTOR, MASKED, REJECTED, Hold
from proxima.core.surrogate import SURROGATES
from proxima.core.surrogate.cppo import Cppo, Dppo, TvBand
from proxima.data import FieldError
from proxima.training.learner import HeldBounds
from tests.core.batches import packed


def rewritten(factor, measured, target, sign, rate, most):
    """The rule, one case after another."""
    if measured <= 0:
        error = -1.0
    else:
        error = math.log(measured) - math.log(target)
        if error > 1:
            error = 1.0
        if error < -1:
            error = -1.0
    moved = factor * math.e ** (rate * sign * error)
    if moved > most:
        return most
    if moved < 1 / most:
        return 1 / most
    return moved


@pytest.mark.parametrize("seed", range(3))
def test_the_rule_against_a_rewriting(seed):
    random = np.random.default_rng(seed)
    for _ in range(200):
        target, measured = random.uniform(0.001, 0.5), max(0.0, random.normal(0.05, 0.1))
        rate, most, factor = random.uniform(0.01, 1), random.uniform(1, 9), random.uniform(0.2, 5)
        hold = Hold(masked=target, rate=rate, most=most)
        expected = rewritten(factor, measured, target, 1.0, rate, most)
        assert hold.next(factor, {MASKED: measured}) == pytest.approx(expected, abs=1e-12)
        assert hold.next(factor, {MASKED: measured + 0.25, REJECTED: 0.25}) == pytest.approx(expected, abs=1e-9)
        hold = Hold(drift=target, rate=rate, most=most)
        expected = rewritten(factor, measured, target, -1.0, rate, most)
        assert hold.next(factor, {DRIFT: measured}) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("rejected", "share"), [("count", 0.1), ("drop", 0.125)])
def test_what_a_correction_rejects_is_not_masked_by_the_region(rejected, share):
    """Of ten tokens the region drops one and a correction rejects two. Those leave the loss, or stay in it."""
    ratio = torch.tensor([1.0] * 8 + [9.0] * 2, dtype=torch.float64)
    current = torch.tensor([1.0] * 7 + [3.0] + [9.0] * 2, dtype=torch.float64)
    behavior = torch.full_like(ratio, -8.0)
    columns = {"behavior_log_prob": behavior, "proximal_log_prob": behavior + ratio.log()}
    columns |= {"log_prob": behavior + current.log(), "advantage": torch.ones_like(ratio)}
    correction = Importance(bound="clip", upper=2.0, rejected=rejected)
    loss = policy_loss(packed([10], **columns), surrogate=PpoClip(), aggregate=TokenMean(), correction=correction)
    metrics = {name: metric.value for name, metric in loss.metrics.items()}
    assert Hold(masked=share).next(1.0, metrics) == pytest.approx(1.0)


def test_what_is_not_measured_moves_nothing():
    for hold in (Hold(masked=0.02), Hold(drift=1.0)):
        assert hold.next(1.7, {}) == 1.7
        assert hold.next(1.7, {hold.metric: math.nan}) == 1.7


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "masked"),
        ({"masked": 0.1, "drift": 1.0}, "masked"),
        ({"masked": 0.0}, "masked"),
        ({"masked": 1.0}, "masked"),
        ({"drift": 0.0}, "drift"),
        ({"drift": math.inf}, "drift"),
        ({"masked": 0.1, "rate": 0.0}, "rate"),
        ({"masked": 0.1, "most": 0.9}, "most"),
    ],
)
def test_bad_settings(fields, field):
    with pytest.raises(FieldError) as caught:
        Hold(**fields)
    assert caught.value.field == field


def test_every_bound_is_scaled_and_nothing_else():
    assert Cppo(delta=0.1, delta_b=0.02, w_min=0.7).scaled(2) == Cppo(delta=0.2, delta_b=0.04, w_min=0.7)
    assert Dppo(delta=0.25).scaled(2) == Dppo(delta=0.5)
    assert Dppo(delta=0.1, delta_low=0.05).scaled(2) == Dppo(delta=0.2, delta_low=0.1)
    assert TvBand(epsilon=0.3).scaled(0.5) == TvBand(epsilon=0.15)
    for cls in SURROGATES.values():
        assert set(cls.unbounded) <= set(cls.bounds) or not cls.bounds  # where all are scaled, none is left


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("target", [0.02, 0.2])
def test_it_finds_the_bound_that_holds_the_share(spread, target):
    """Tokens whose divergence has one law in every step: the bound that drops this share of them is its quantile."""
    random = np.random.default_rng(3)
    held = HeldBounds(Hold(masked=target, most=64.0))
    delta = Dppo().delta
    factors = []
    for _ in range(300):
        moved = np.abs(random.normal(0, spread, 4096))
        share = float((moved > held.factor * delta).mean())
        held = held.after({MASKED: share})
        factors.append(held.factor)
    half = torch.distributions.Normal(0, spread).icdf(torch.tensor(1 - target / 2))
    assert np.mean(factors[-100:]) * delta == pytest.approx(float(half), rel=0.05)


def test_the_metrics_of_a_step_name_its_bounds():
    held = HeldBounds(Hold(masked=0.1), factor=2.0)
    assert held.metrics(Cppo(delta=0.1, delta_b=0.02)) == {FACTOR: 2.0, "hold/delta": 0.2, "hold/delta_b": 0.04}
    assert held.metrics(Dppo(delta=0.1)) == {FACTOR: 2.0, "hold/delta": 0.2}
