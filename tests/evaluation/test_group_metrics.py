"""Scored groups into figures: what several samples, failed scorers, silence and truncation do to each of them."""

import pytest

from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.evaluation.estimators import powers_of_two
from proxima.evaluation.group_metrics import eval_metrics, mean_estimates
from proxima.evaluation.votes import answer_extractor
from proxima.reward.math.marked import Gsm8kReward

MEANS = ["reward/mean", "length/mean", "truncated_fraction"]
FIND = answer_extractor([Gsm8kReward()])
RIGHT, WRONG, FAILED = Score(value=1.0, correct=True), Score(value=0.0, correct=False), Score.failed("timed out")


def group(uid, *samples):
    """`(text, score)` each, or `(text, score, "length")`."""
    completions = [Completion.of_text(uid, i, text, [1] * len(text), *end) for i, (text, _, *end) in enumerate(samples)]
    prompt = Prompt(uid=uid, messages=({"role": "user", "content": f"q{uid}"},), tokens=(1, 2), answer="7")
    return Group(prompt=prompt, completions=tuple(completions), scores=tuple(score for _, score, *_ in samples))


def test_one_answer_a_question():
    answers = [("#### 7", RIGHT), ("#### 8", WRONG), ("dunno", WRONG, "length"), ("#### 7", FAILED)]
    groups = [group(i, answer) for i, answer in enumerate(answers)]
    metrics = eval_metrics(groups, samples=1, extract=FIND)
    bounds = {"low": pytest.approx(0.0615, abs=1e-4), "high": pytest.approx(0.7923, abs=1e-4)}
    accuracy = {"value": pytest.approx(1 / 3), **bounds, "method": "wilson", "questions": 3}
    assert metrics["estimates"]["accuracy"] == accuracy
    counts = {"questions": 4, "answers": 4, "correct": 1, "known": 3, "invalid": 1}
    assert {name: metrics[name] for name in counts} == counts
    assert metrics["truncated"] == metrics["unanswered"] == 0.25 and metrics["reward"] == pytest.approx(1 / 3)
    assert metrics["length"] == {"mean": 5.75, "median": 6, "max": 6} and metrics["tokens"] == 23


def test_several_answers_a_question():
    """By hand: right shares 1/2, 1/4, 0; pass@2 5/6, 1/2, 0; the vote of all four: the right answer, a tie of three,
    nothing."""
    groups = [
        group(0, ("#### 7", RIGHT), ("#### 7", RIGHT), ("#### 1", WRONG), ("", WRONG)),
        group(1, ("#### 7", RIGHT), ("#### 1", WRONG), ("#### 2", WRONG), ("", WRONG)),
        group(2, ("#### 1", WRONG), ("#### 1", WRONG), ("", WRONG), ("", WRONG)),
    ]
    estimates = eval_metrics(groups, samples=4, extract=FIND)["estimates"]
    assert list(estimates) == ["mean@4", "pass@2", "pass@4", "maj@2", "maj@4", *MEANS]
    assert estimates["mean@4"]["value"] == pytest.approx((1 / 2 + 1 / 4) / 3)
    assert estimates["pass@2"]["value"] == pytest.approx((5 / 6 + 1 / 2) / 3)
    assert estimates["pass@4"]["value"] == pytest.approx(2 / 3)
    assert estimates["maj@4"]["value"] == pytest.approx((1 + 1 / 3) / 3)
    # pairs of question 0: 77 → 1, 7-1 twice → 1/2 each, 7-silence twice → 1, 1-silence → 0; of question 1: 7-1, 7-2 →
    # 1/2, 7-silence → 1
    assert estimates["maj@2"]["value"] == pytest.approx(((1 + 2 * 0.5 + 2 * 1) / 6 + (0.5 + 0.5 + 1) / 6) / 3)
    assert all(e["low"] <= e["value"] <= e["high"] for e in estimates.values())
    assert all(estimates[name]["method"] == "bootstrap" for name in list(estimates)[:6])


def test_only_the_ks_asked_for():
    groups = [group(i, *[("#### 7", RIGHT if i else WRONG)] * 8) for i in range(3)]
    names = ["mean@8", "pass@5", "maj@5", *MEANS]
    assert list(eval_metrics(groups, samples=8, ks=(1, 5), extract=FIND)["estimates"]) == names
    with pytest.raises(ValueError, match="k=9 must be <= samples=8"):
        eval_metrics(groups, samples=8, ks=(9,))
    assert powers_of_two(1) == (1,) and powers_of_two(8) == (1, 2, 4, 8) and powers_of_two(6) == (1, 2, 4, 6)


def test_a_failed_scorer_is_not_a_wrong_answer():
    groups = [group(0, ("#### 7", RIGHT), ("#### 7", FAILED)), group(1, ("#### 7", FAILED), ("#### 7", FAILED))]
    metrics = eval_metrics(groups, samples=2, extract=FIND)
    assert metrics["estimates"]["mean@2"]["value"] == 1.0 and metrics["estimates"]["mean@2"]["questions"] == 1
    assert "pass@2" not in metrics["estimates"] and metrics["invalid"] == 3  # no question has two known samples


def test_nobody_knows_what_is_right():
    metrics = eval_metrics([group(0, ("a", Score(value=0.25)))], samples=1, extract=None)
    assert list(metrics["estimates"]) == MEANS and metrics["reward"] == 0.25 and metrics["unanswered"] is None
    assert eval_metrics([], samples=1)["length"] is None


def test_means_of_the_rewards_and_their_parts():
    """By hand: question means 0.5 and 2; a failed sample is in no reward, but has a length."""
    half, none = Score(value=1.0, parts={"style": 1.0, "style/near": 0.5}), Score(value=0.0, parts={"style": 0.0})
    groups = [group(0, ("a", half), ("b", none)), group(1, ("cc", Score(value=2.0)), ("d", FAILED, "length"))]
    means = mean_estimates(groups)
    expected = {"reward/mean": (1.25, 2), "length/mean": (1.25, 2), "truncated_fraction": (0.25, 2)}
    expected |= {"reward/part/style": (0.5, 1), "reward/part/style/near": (0.5, 1)}
    assert {name: (e.value, e.questions) for name, e in means.items()} == expected
    reward = means["reward/mean"]
    assert reward.method == "bootstrap" and (reward.low, reward.high) == (0.5, 2.0)
    assert means["reward/part/style"].method == "constant" and mean_estimates([]) == {}
