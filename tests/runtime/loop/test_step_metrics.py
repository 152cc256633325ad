"""Numbers of a step for metrics.jsonl."""

from dataclasses import replace

import pytest

from proxima.runtime.loop.step_review import mean_metrics, rollout_metrics
from tests.training.test_batch_builder import algorithm, group


def scored(uid, rewards, correct):
    """Each score has a part `p` and says whether the answer is right."""
    plain = group(uid, rewards)
    scores = (replace(s, parts={"p": s.value}, correct=correct) if s.valid else s for s in plain.scores)
    return replace(plain, scores=tuple(scores))


def test_parts_and_accuracy():
    chosen = algorithm().step_batch([scored(0, [1, 0, None], True), scored(1, [3, 4, 4], False)], 1)
    metrics = rollout_metrics(chosen.groups, chosen)
    assert metrics["accuracy"] == pytest.approx(2 / 5) and metrics["reward/part/p"] == pytest.approx(12 / 5)


def test_metrics_that_are_no_numbers_are_left_out():
    assert mean_metrics({"entropy": 0.5, "approx_kl": float("nan"), "ratio_max": float("inf"), "loss": 0.0}) == {
        "entropy/mean": 0.5,
        "loss": 0.0,
    }
