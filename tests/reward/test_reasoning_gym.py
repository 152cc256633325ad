"""Every reasoning_gym task with its own scorer, through the worker."""

from dataclasses import replace
from functools import partial

import pytest

from proxima.reward.reasoning_gym import ReasoningGymReward
from proxima.reward.workers.graders import EVAL_TASKS
from proxima.task.prompts import to_prompt
from proxima.task.reasoning_gym import ReasoningGymTask as Task
from tests.lent_servers import lent_servers
from tests.reward.make import ask, completions, prompt, runner
from tests.tiny import tiny_tokenizer

pytest.importorskip("reasoning_gym")

from reasoning_gym.factory import DATASETS

# No reference answer in their first rows, so that there is nothing to score with 1.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
TAKES_ANYTHING = {"game_of_life_halting"}  # its scorer compares bool(text), which is True of any text


@pytest.fixture(scope="module")
def judged():
    with lent_servers(), runner(ReasoningGymReward(), workers=1) as made:
        yield partial(ask, made)


def row_of(task, index=0, **config):
    return to_prompt(Task(task=task, size=2, config=config).rows(seed=3)[index], index, tiny_tokenizer())


SMALL = "tests/reward/test_reasoning_gym.py::test_every_task_scores_its_own_answer[chain_sum]"
FIRST = WITHOUT_ANSWER | TAKES_ANYTHING | {*EVAL_TASKS, "chain_sum", "countdown", "gsm_symbolic", "prime_factorization"}


def campaign_of(task):
    return pytest.param(task, marks=() if task in FIRST else pytest.mark.campaign(SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("task", map(campaign_of, sorted(set(DATASETS) - {"composite"})))
def test_every_task_scores_its_own_answer(judged, task):
    row = row_of(task)
    answer = "nothing of the kind" if row.answer is None else row.answer
    right, tagged, wrong = judged(row, answer, f"<think>So</think> <answer>\n{answer}</answer>", "I don't know.")
    assert right.valid and tagged.valid and wrong.valid, (right.error, wrong.error)
    assert tagged.value == right.value
    if task not in TAKES_ANYTHING:
        assert wrong.value < 1 and wrong.correct is False
    if task in WITHOUT_ANSWER:
        assert row.answer is None and right.correct is False
    else:
        assert right.value == pytest.approx(1.0) and right.correct is True


def test_an_unreadable_answer_is_wrong_and_a_broken_entry_is_not(judged):
    row = row_of("prime_factorization")
    (score,) = judged(row, "I don't know.")
    assert (score.valid, score.value, score.correct) == (True, 0.0, False)
    source = row.metadata["reasoning_gym"]
    broken = replace(row, metadata={"reasoning_gym": {**source, "entry": {**source["entry"], "answer": "?"}}})
    (score,) = judged(broken, "I don't know.")
    assert not score.valid and "ValueError" in score.error


@pytest.mark.slow
def test_a_scorer_that_evaluates_its_answer_reads_literals_only(judged, tmp_path):
    target = tmp_path / "written"
    attack = f"__import__('pathlib').Path({str(target)!r}).write_text('x')"
    tasks = ("spiral_matrix", "string_insertion", "binary_matrix", "n_queens", "countdown", "puzzle24")
    for task in (*tasks, "decimal_arithmetic"):
        (score,) = judged(row_of(task), f"<answer>{attack}</answer>")
        assert score.correct is not True
    assert not target.exists()


def test_tag_and_threshold():
    row, partly_right = row_of("basic_arithmetic"), row_of("chain_sum")
    bare, tagged = completions(row.answer, f"<answer>{row.answer}</answer>")
    assert [s.value for s in ReasoningGymReward(strict=True).score(row, [bare, tagged])] == [0.0, 1.0]
    assert [s.value for s in ReasoningGymReward(tag=None).score(row, [bare])] == [1.0]
    said = completions(f"It is {partly_right.answer}, I think")
    (partly,) = ReasoningGymReward(correct_at=0.01).score(partly_right, said)
    assert 0 < partly.value < 1 and partly.correct is True


def test_rows_of_other_tasks_are_refused(judged):
    (score,) = judged(prompt("42"), "42")
    assert not score.valid and "not a row of the task 'reasoning_gym'" in score.error
    unknown = {"reasoning_gym": {"task": "no_such", "config": {}, "entry": {}}}
    (score,) = judged(replace(prompt("42"), metadata=unknown), "42")
    assert not score.valid and "no_such" in score.error
