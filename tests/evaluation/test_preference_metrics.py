"""Figures of held-out preferences, by hand."""

import pytest

from proxima.evaluation.pair_metrics import ComparedItem, preference_metrics


def pair(question, chosen, rejected, loss=None):
    return ComparedItem(
        question=question,
        reward={"chosen": chosen, "rejected": rejected},
        log_prob={"chosen": rejected - 5, "rejected": chosen - 5},  # the other way round
        loss=loss,
    )


def test_pairs():
    metrics = preference_metrics([pair(b"a", 1.0, 0.0, 0.5), pair(b"b", 0.5, 0.5), pair(b"b", -1.0, 1.0, 1.5)])
    assert metrics["accuracy"] == pytest.approx(0.5) and metrics["log_prob_accuracy"] == pytest.approx(0.5)
    assert metrics["accuracy/low"] < 0.5 < metrics["accuracy/high"]
    assert metrics["rewards/margins"] == pytest.approx(-1 / 3) and metrics["loss"] == 1.0
    assert (metrics["correct"], metrics["answers"], metrics["questions"]) == (1, 3, 2)
    assert metrics["rewards/chosen"] == pytest.approx(1 / 6) and metrics["logps/rejected"] == pytest.approx(1 / 6 - 5)


def labeled(side, reward):
    return ComparedItem(question=b"", reward={side: reward}, log_prob={side: -reward})


def test_completions_with_a_label():
    good, bad = [labeled("chosen", x) for x in (2.0, 1.0)], [labeled("rejected", x) for x in (0.0, 1.0, 3.0)]
    metrics = preference_metrics(good + bad)
    assert metrics["accuracy"] == pytest.approx((1 + 1 + 0 + 1 + 0.5 + 0) / 6)  # six couples, a tie is a half
    # the shares of the good are 2/3 and 1/2, of the bad 1, 3/4 and 0: variances .0069 and .0903, beyond both ends
    assert (metrics["accuracy/low"], metrics["accuracy/high"]) == (0.0, 1.0)
    assert metrics["rewards/rejected"] == pytest.approx(4 / 3) and "answers" not in metrics and "loss" not in metrics
    assert "accuracy" not in preference_metrics(good)
