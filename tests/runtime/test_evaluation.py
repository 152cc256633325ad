"""Held-out numbers: what a failed scorer, several samples and unknown correctness do to the accuracy."""

from dataclasses import replace

from proxima.data import Group, Score
from proxima.runtime.evaluation import summarise
from tests.runtime.test_algorithm import group


def scored(uid, *scores):
    plain = group(uid, [0] * len(scores))
    return Group(prompt=plain.prompt, completions=plain.completions, scores=scores)


RIGHT, WRONG, UNKNOWN = Score(value=1.0, correct=True), Score(value=0.0, correct=False), Score(value=0.5)
FAILED = replace(Score.failed("timed out"), correct=True)  # one reward knew, another failed: the completion is invalid all the same


def test_accuracy_is_over_what_was_scored():
    found = summarise([scored(0, RIGHT, WRONG), scored(1, FAILED, RIGHT), scored(2, WRONG, FAILED)])
    assert (found["accuracy"], found["correct"], found["questions"], found["answers"], found["invalid"]) == (0.5, 2, 3, 6, 2)
    assert found["reward/mean"] == 0.5 and found["truncated_fraction"] == 0.5 and found["tokens/generated"] == 18


def test_no_reward_knows_or_none_answered():
    assert summarise([scored(0, UNKNOWN)])["accuracy"] is None
    nothing = summarise([scored(0, FAILED)])
    assert nothing["accuracy"] is nothing["reward/mean"] is None and nothing["invalid"] == 1
    assert summarise([])["questions"] == 0
