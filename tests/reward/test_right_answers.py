"""A list of right answers is any of them, for every reward that compares."""

import json
import subprocess
import sys

import pytest

from proxima.data.flow import Score
from proxima.reward import REWARDS
from proxima.reward.base import WeightedReward
from proxima.reward.math.numbers import Accuracy152, Number
from proxima.reward.math.symbolic import Math
from proxima.reward.text import Exact
from proxima.reward.unit_tests import UnitTests
from tests.reward.make import completions, corrects, prompt, runner, scored, values

RIGHT = {  # kind → answers, a completion that the second one makes right, and one that is wrong
    "accuracy_1_5_2": (["60", "61"], "<answer>61</answer>", "<answer>60, 61</answer>"),
    "boxed": (["sixty-one", "61"], r"\boxed{61}", r"\boxed{['sixty-one', '61']}"),
    "exact": (["Jane Austen", "Austen"], "Austen", "['Jane Austen', 'Austen']"),
    "gsm8k": (["60", "so #### 61"], "#### 61", "#### 62"),
    "math": ([r"\sqrt{2}", r"2\sqrt{3}"], r"\boxed{\sqrt{12}}", r"\boxed{\sqrt{11}}"),
    "number": ([60, "61"], "It is 61.", "It is 62."),
    "regex": (["Paris", "London"], "<answer>London</answer>", "<answer>Rome</answer>"),
}


def test_every_reward_that_compares_is_here():
    compares = {kind for kind, reward in REWARDS.items() if reward.needs_answer and not reward.reads_lists}
    assert compares == RIGHT.keys()


@pytest.mark.parametrize("kind", sorted(RIGHT))
def test_any_of_a_list_is_right(kind):
    answers, right, wrong = RIGHT[kind]
    reward = REWARDS[kind]()
    assert reward.unreadable(answers) is None
    assert corrects(reward, answers, right, wrong) == corrects(reward, answers[::-1], right, wrong) == [True, False]
    assert corrects(reward, answers[1:], right, wrong) == [True, False]
    with runner(reward) as made:  # as a run calls it, in a worker where it has one
        assert made.unreadable([answers, [*answers, None], []]) == [
            None,
            f"{kind}: a list of right answers whose element 2 is null",
            f"{kind}: an empty list: nothing would be right",
        ]
    assert [score.correct for score in scored([reward], answers, right, wrong, right)] == [True, False, True]


def test_the_best_score_counts():
    texts = ["<answer>61</answer>", "<answer>61.0</answer>", "<answer>7</answer>"]
    assert values(scored([Accuracy152()], ["61.00", "61"], *texts)) == [2.0, 1.5, 0.0]


def test_an_unreadable_element_makes_the_list_unreadable():
    assert Number().unreadable([61, "sixty-one"]) == "element 1: not a number; use 'exact' or 'math'"
    assert Math().unreadable(["61", "no idea"]).startswith("element 1: is prose")
    with runner(Math()) as made:
        assert made.unreadable([["61", "no idea"], [r"2\sqrt{3}", "x^{"]])[1].startswith("math: element 1: ")


def test_a_failed_comparison_is_never_a_wrong_answer():
    right, unknown = scored([Number()], ["61", "sixty-two"], "61", "62")
    assert right == Score(value=1.0, correct=True, parts={"number": 1.0})
    assert not unknown.valid and "is not a number" in unknown.error


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            {"value": "Austen", "aliases": ["Jane Austen"]},
            "map one of its keys, as task.answer=COLUMN.KEY (keys: value, ",
        ),
        ([["Austen"]], "a list of right answers whose element 0 is a list"),
        ('["Jane Austen", "Austen"]', "a list in a text"),
        ("['Jane Austen', 'Austen']", "a list in a text"),
        ([], "an empty list"),
    ],
)
def test_what_is_neither_an_answer_nor_a_list_of_them_has_no_score(answer, reason):
    assert reason in Exact().unreadable(answer)
    (score,) = scored([Exact()], answer, str(answer))
    assert not score.valid and reason in score.error


def test_a_text_is_one_answer():
    assert corrects(Exact(), "[0, 5]", "[0, 5]", "0") == [True, False]
    assert corrects(Math(), "[0,5]", r"\boxed{[0,5]}", r"\boxed{5}") == [True, False]
    text = '["a", "b"]'
    assert corrects(Exact(), [text], text, "a") == [True, False]


def test_a_reward_that_reads_lists_gets_the_list():
    assert UnitTests().right_answers(["assert f() == 1", "assert f(2) == 2"]) == [
        ["assert f() == 1", "assert f(2) == 2"]
    ]


def test_a_reward_of_another_package_gets_one_at_a_time():
    class Nearest(WeightedReward):
        needs_answer = True

        def score_one(self, prompt, completion):
            return Score(value=1 / (1 + abs(float(completion.text) - prompt.answer)))

    assert values(Nearest().score(prompt([1, 5]), completions("4", "1"))) == [0.5, 1.0]


def test_reward_score_reads_lists(tmp_path):
    file = tmp_path / "answers.jsonl"
    texts = ["Austen", "['Jane Austen', 'Austen']"]
    row = {"question": "Who wrote Emma?", "answer": ["Jane Austen", "Austen"]}
    file.write_text("".join(json.dumps(row | {"completion": text}) + "\n" for text in texts))
    words = ["reward", "score", str(file), "--reward", "exact", "--json-out", str(tmp_path / "out.json")]
    subprocess.run([sys.executable, "-m", "proxima", *words], check=True, capture_output=True)
    assert [score["value"] for score in json.loads((tmp_path / "out.json").read_text())["rows"]] == [1.0, 0.0]


def test_reward_score_reads_a_list_in_a_cell_where_it_is_told(tmp_path):
    file, out = tmp_path / "answers.csv", tmp_path / "out.json"
    file.write_text('question,answer,completion\nWho?,"[""Jane Austen"", ""Austen""]",Austen\n')
    words = [sys.executable, "-m", "proxima", "reward", "score", str(file), "--reward", "exact", "--json-out", str(out)]
    refused = subprocess.run(words, capture_output=True, text=True)
    assert refused.returncode == 1 and "--json-column" in refused.stdout
    subprocess.run([*words, "--json-column", "answer"], check=True, capture_output=True)
    assert json.loads(out.read_text())["rows"][0]["value"] == 1.0
