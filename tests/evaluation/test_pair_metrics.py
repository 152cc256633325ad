"""Accuracy, calibration and baselines of scored pairs, by numbers worked out by hand."""

import math

import numpy as np
import pytest

from proxima.evaluation.intervals import ratio_of_sums, wilson
from proxima.evaluation.pair_metrics import ScoredPair, pair_metrics


def pair(question, lead, longer=0, base=1.0):
    return ScoredPair(question=question, chosen=base + lead, rejected=base, chosen_length=5 + longer, rejected_length=5)


def test_accuracy_and_baselines_by_hand():
    """Four questions with one pair: two right, a tie, one wrong; chosen is shorter in three, and as long in one."""
    metrics = pair_metrics([pair(9, 2.0, -1), pair(2, 0.5, -2), pair(7, 0.0, -1), pair(4, -1.0)])
    assert (metrics["accuracy"], metrics["correct"], metrics["answers"], metrics["questions"]) == (0.5, 2, 4, 4)
    assert (metrics["accuracy/low"], metrics["accuracy/high"]) == wilson(2, 4)
    assert metrics["length_only/accuracy"] == 0.875  # the shorter side, and half for the equal lengths
    assert metrics["over_length/accuracy"] == 0.5 - 0.875
    assert metrics["random/accuracy"] == 0.5
    assert (metrics["random/accuracy/low"], metrics["random/accuracy/high"]) == wilson(2, 4)
    losses = [math.log1p(math.exp(-lead)) for lead in (2.0, 0.5, 0.0, -1.0)]
    assert metrics["loss"] == pytest.approx(sum(losses) / 4)
    scores = [3.0, 1.0, 1.5, 1.0, 1.0, 1.0, 0.0, 1.0]
    assert (metrics["score/mean"], metrics["score/std"]) == pytest.approx((np.mean(scores), np.std(scores)))


@pytest.mark.slow
def test_the_interval_is_over_questions():
    """Copies of a pair say nothing new: ten of each leave the interval of the questions, not that of 40 pairs."""
    single = [pair(0, 1.0), pair(0, -1.0), pair(1, 1.0), pair(2, 1.0), pair(3, -1.0), pair(3, -1.0)]
    metrics, copied = pair_metrics(single), pair_metrics(single * 10)
    expected = ratio_of_sums([1, 1, 1, 0], [2, 1, 1, 2])
    assert metrics["accuracy"] == 0.5 and metrics["questions"] == 4
    assert (metrics["accuracy/low"], metrics["accuracy/high"]) == pytest.approx((expected.low, min(1.0, expected.high)))
    for key in ("accuracy/low", "accuracy/high", "calibration/error", "calibration/error/high"):
        assert copied[key] == pytest.approx(metrics[key])
    right = pair_metrics([pair(i // 2, 1.0) for i in range(8)])
    assert (right["accuracy/low"], right["accuracy/high"]) == pytest.approx(wilson(4, 4))


def test_calibration_by_hand():
    """Confidence .73 in the third bin, right in one of two; .88 in the fourth, right in both."""
    metrics = pair_metrics([pair(0, 1.0), pair(1, -1.0), pair(2, 2.0), pair(3, 2.0)])
    low, high = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    assert metrics["calibration/error"] == pytest.approx(0.5 * abs(0.5 - low) + 0.5 * abs(1 - high))
    assert metrics["calibration/70-80/pairs"] == 2 and metrics["calibration/70-80/right"] == 0.5
    assert metrics["calibration/70-80/confidence"] == pytest.approx(low)
    assert metrics["calibration/80-90/right"] == 1 and "calibration/50-60/pairs" not in metrics
    assert metrics["calibration/error/low"] <= metrics["calibration/error"] <= metrics["calibration/error/high"]


@pytest.mark.slow
def test_scores_that_know_their_confidence_are_calibrated():
    draw = np.random.default_rng(0)
    leads = np.abs(draw.normal(0, 2, 2000))
    signs = np.where(draw.random(2000) < 1 / (1 + np.exp(-leads)), 1, -1)
    honest = pair_metrics([pair(i, float(x)) for i, x in enumerate(leads * signs)])
    boasting = pair_metrics([pair(i, float(3 * x)) for i, x in enumerate(leads * signs)])
    assert honest["calibration/error"] < 0.03 < 0.08 < boasting["calibration/error/low"]
    assert honest["accuracy"] == boasting["accuracy"] > honest["random/accuracy/high"]


def test_extreme_scores_stay_finite():
    metrics = pair_metrics([pair(0, 1e5), pair(1, -1e5)])
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["calibration/90-100/confidence"] == 1.0
