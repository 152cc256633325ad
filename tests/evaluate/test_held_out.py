"""Held-out numbers: what a failed scorer, several samples and unknown correctness do, and how scoring runs beside
generation."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from proxima.data import Completion, Group, Prompt, Score
from proxima.engine.protocol import Sampling
from proxima.evaluate import wilson
from proxima.evaluate.held_out import Evaluation, named_metric, summarise
from proxima.rollout.generator import GroupGenerator, GroupSpec
from tests.train.test_batch_builder import group


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


class Engine:
    """Gives the answers one by one, in the order asked for from the last to the first, and lets others have a turn in
    between."""

    def __init__(self, log, lose=None):
        self.log, self.lose = log, lose

    async def generate(self, requests):
        for request in reversed(requests):
            await asyncio.sleep(0)
            if request.prompt.uid == self.lose:
                continue
            self.log.append(f"answer {request.prompt.uid}.{request.sample}")
            text = str(request.sample)
            yield Completion.of_text(request.prompt.uid, request.sample, text, tokens=(request.sample,))


class Rewards:
    has_batch = False

    def __init__(self, log):
        self.log = log

    async def score(self, prompt, completions):
        self.log.append(f"score {prompt.uid}")
        await asyncio.sleep(0)
        return [Score(value=float(c.text), correct=c.text == "1") for c in completions]


class BatchRewards(Rewards):
    has_batch = True

    async def score_batch(self, groups):
        self.log.append(f"batch of {len(groups)}")
        return [replace(g, scores=tuple(replace(s, value=s.value + 10) for s in g.scores)) for g in groups]


def evaluation(log, engine=None, rewards=None, now=lambda: 0.0):
    prompts = [Prompt(uid=uid, messages=({"role": "user", "content": "q"},), tokens=(1,)) for uid in (7, 8, 9)]
    spec = GroupSpec(sampling=Sampling(), completions=2)
    generator = GroupGenerator(engine or Engine(log), rewards or Rewards(log), spec, now)
    return Evaluation(prompts, generator, lambda *_: None)


def test_questions_are_scored_while_others_are_answered():
    log, times = [], iter([5.0, 7.5])
    held_out = evaluation(log, now=lambda: next(times))
    groups = asyncio.run(held_out.groups())
    assert log.index("score 9") < log.index("answer 7.0")
    assert [g.prompt.uid for g in groups] == [7, 8, 9] and [c.sample for c in groups[0].completions] == [0, 1]
    assert [s.correct for s in groups[0].scores] == [False, True] and held_out.generator.scoring_seconds == 2.5


def test_rewards_of_the_whole_batch_speak_last():
    log = []
    groups = asyncio.run(evaluation(log, rewards=BatchRewards(log)).groups())
    assert log[-1] == "batch of 3" and [s.value for s in groups[2].scores] == [10.0, 11.0]


def test_a_lost_answer_is_said():
    log = []
    with pytest.raises(RuntimeError, match="the engine ended without all completions of prompts \\[8\\]"):
        asyncio.run(evaluation(log, engine=Engine(log, lose=8)).groups())


def test_several_samples_are_drawn_as_in_training(tiny_model, tmp_path):
    """A whole run: the records have the figures of several samples, the answers differ, and greedy samples are
    refused."""
    from proxima.config import ConfigError, resolve
    from proxima.runtime.state.folder import RunFolder
    from proxima.runtime.state.rollouts import read_rows
    from tests.runtime.tiny_run import go, recipe

    tree = recipe(tiny_model("llama"), eval__samples=4, sampling__temperature=0.8, sampling__top_p=0.9, train__steps=1)
    settings = resolve(tree).config.eval.sampling
    assert (settings.temperature, settings.top_p, settings.max_tokens) == (0.8, 0.9, 6)
    greedy = resolve(tree | {"eval": tree["eval"] | {"samples": 1}}).config.eval.sampling
    assert greedy == Sampling(temperature=0.0, max_tokens=6)
    go(tmp_path / "run", tree)
    run = RunFolder(tmp_path / "run")
    records = [r for r in run.read_metrics() if r["kind"] == "eval"]
    assert [r["label"] for r in records] == ["before", "after"]
    for record in records:
        rows = read_rows(run.eval_file(record["step"], record["label"]))
        right = Counter(row["prompt_uid"] for row in rows if row["correct"])
        assert len(rows) == record["answers"] == 20 and len({row["text"] for row in rows}) > 10
        assert record["mean@4"] == record["accuracy"] == right.total() / 20
        assert record["pass@4"] == len(right) / 5
        assert record["accuracy/low"] <= record["accuracy"] <= record["accuracy/high"] and record["time/score"] >= 0
    message = r"eval.samples=4 \(mapping\): must be 1 at temperature 0: greedy answers are identical"
    with pytest.raises(ConfigError, match=message):
        resolve(tree | {"eval": tree["eval"] | {"sampling": {"temperature": 0}}})


def test_a_metric_that_no_reward_gives_names_the_resume_that_works():
    record = {"accuracy": None, "reward/mean": 0.5, "reward/low": 0.4, "reward/high": 0.6, "invalid": 0, "answers": 5}
    _, problem = named_metric(record, "accuracy")
    assert problem.endswith("Continue with --resume eval.metric=reward")
