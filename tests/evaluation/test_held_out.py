"""Held-out numbers: what a failed scorer, several samples and unknown correctness do."""

import asyncio
from dataclasses import replace

import pytest

from proxima.config.resolution import resolve
from proxima.data.flow import Group, Prompt, Score
from proxima.engine.protocol import Sampling
from proxima.evaluation.headline import named_metric
from proxima.evaluation.held_out import Evaluation, summarise
from proxima.evaluation.intervals import wilson
from tests.runtime.tiny_run import recipe
from tests.training.test_batch_builder import group


def scored(uid, *scores):
    plain = group(uid, [0] * len(scores))
    return Group(prompt=plain.prompt, completions=plain.completions, scores=scores)


RIGHT, WRONG, UNKNOWN = Score(value=1.0, correct=True), Score(value=0.0, correct=False), Score(value=0.5)
FAILED = replace(Score.failed("timed out"), correct=True)  # one reward knew, another failed: invalid all the same


def test_accuracy_is_over_what_was_scored():
    summary = summarise([scored(0, RIGHT, WRONG), scored(1, FAILED, RIGHT), scored(2, WRONG, FAILED)])
    expected = {"accuracy": 0.5, "correct": 2, "questions": 3, "answers": 6, "invalid": 2, "reward/mean": 0.5}
    expected |= {"truncated_fraction": 0.5, "tokens/generated": 18}
    assert {name: summary[name] for name in expected} == expected


def test_no_reward_knows_or_none_answered():
    assert summarise([scored(0, UNKNOWN)])["accuracy"] is None
    nothing = summarise([scored(0, FAILED)])
    assert nothing["accuracy"] is nothing["reward/mean"] is None and nothing["invalid"] == 1
    assert "accuracy/low" not in nothing
    assert summarise([])["questions"] == 0


def test_one_answer_a_question_has_wilsons_bounds():
    summary = summarise([scored(i, RIGHT if i < 3 else WRONG) for i in range(10)] + [scored(10, FAILED)])
    assert (summary["accuracy"], (summary["accuracy/low"], summary["accuracy/high"])) == (0.3, wilson(3, 10))
    assert not [key for key in summary if "@" in key]


def test_several_answers_give_pass_at_k():
    summary = summarise([scored(i, *[RIGHT] * right, *[WRONG] * (4 - right)) for i, right in enumerate((1, 2, 0))])
    assert summary["mean@4"] == summary["accuracy"] == 0.25
    assert summary["pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 3) and summary["pass@4"] == pytest.approx(2 / 3)
    assert summary["accuracy/low"] < 0.25 < summary["accuracy/high"] and "pass@1" not in summary


class Backwards:
    """A generator whose groups are complete in the opposite order."""

    async def generate(self, prompts, listener):
        for prompt in reversed(prompts):
            yield scored(prompt.uid, RIGHT)


def test_groups_are_in_the_order_of_the_questions():
    prompts = [Prompt(uid=uid, messages=(), tokens=(1,)) for uid in (7, 8, 9)]
    groups = asyncio.run(Evaluation(prompts, Backwards(), lambda *_: None).groups())
    assert [group.prompt.uid for group in groups] == [7, 8, 9]


def test_several_samples_are_drawn_as_in_training(tiny_model):
    tree = recipe(tiny_model("llama"), eval__samples=4, sampling__temperature=0.8, sampling__top_p=0.9)
    settings = resolve(tree).config.eval.sampling
    assert (settings.temperature, settings.top_p, settings.max_tokens) == (0.8, 0.9, 6)
    greedy = resolve(tree | {"eval": tree["eval"] | {"samples": 1}}).config.eval.sampling
    assert greedy == Sampling(temperature=0.0, max_tokens=6)


def test_a_metric_that_no_reward_gives_names_the_resume_that_works():
    record = {"accuracy": None, "reward/mean": 0.5, "reward/low": 0.4, "reward/high": 0.6, "invalid": 0, "answers": 5}
    _, problem = named_metric(record, "accuracy")
    assert problem.endswith("Continue with --resume eval.metric=reward")


def test_a_metric_of_a_role_that_nobody_played_is_unknown_and_no_error():
    record = {"accuracy": None, "reward/mean": 0.5, "reward/low": 0.4, "reward/high": 0.6, "invalid": 0, "answers": 5}
    assert named_metric(record, "reward/solver", optional={"reward/solver"}) == ("reward/solver", "")
    assert "no such metric" in named_metric(record, "reward/solvr", optional={"reward/solver"})[1]
