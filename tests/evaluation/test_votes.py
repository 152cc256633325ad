r"""What texts vote for, with the real shapes of answers: \boxed, ####, tags, plain numbers, silence."""

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

import pytest

from proxima.data.flow import Completion, Prompt
from proxima.evaluation.votes import ANSWER_EXTRACTORS, answer_extractor, canonical
from proxima.reward import REWARDS
from proxima.reward.math.marked import Boxed, Gsm8kReward
from proxima.reward.math.numbers import Accuracy152, Number
from proxima.reward.math.symbolic import Math
from proxima.reward.text import Exact, Format

LAST = "#### 5\nno, wait\n#### $1,234.50"
FOUND = {
    Gsm8kReward(): {"She has 3 + 4 = 7.\n#### 7": "7", LAST: "1234.50", "The answer is 12.": "12"},
    Number(): {"first 3, then -5": "-5"},
    Boxed(): {r"so \boxed{\frac{1}{2}}": r"\frac{1}{2}"},
    Math(): {
        r"first \boxed{3}, then \boxed{4}": "4",
        "<answer> x+1 </answer>": "x+1",
        "so $x = 5$ and we are done": "x = 5",
        "it is 42": "42",
    },
    Accuracy152(): {"so <answer> 18 </answer>": "18"},
    Accuracy152(tag=None): {" 18 <answer>7</answer> ": "18 <answer>7</answer>"},
    Exact(): {"  7 ": "7"},
    Exact(ignore_case=True): {"Paris": "paris"},
}
SILENT = {Gsm8kReward(): ["#### none", "I don't know."], Gsm8kReward(strict=True): ["The answer is 12."]}
SILENT |= {Boxed(): [r"so \boxed{ }", r"so \boxed{1"], Math(): ["who knows"], Exact(): ["   "]}


def vote(rewards, text, begun="", stopped_by=""):
    completion = replace(Completion.of_text(0, 0, text), stopped_by=stopped_by)
    return answer_extractor(rewards)(completion, begun)


@pytest.mark.parametrize("reward", [*FOUND, Gsm8kReward(strict=True)])
def test_the_answer_in_a_text(reward):
    answers = FOUND.get(reward, {}) | dict.fromkeys(SILENT.get(reward, ()))
    assert {text: vote([reward], text) for text in answers} == answers


@pytest.mark.parametrize("ignore_case", [False, True])
def test_two_answers_vote_together_where_the_reward_takes_one_for_the_other(ignore_case):
    reward = Exact(ignore_case=ignore_case)
    answers = ["Paris", " Paris\n", "paris", "PARIS", "straße", "STRASSE", "Lyon", "Paris."]
    for first, second in product(answers, answers):
        prompt = Prompt(uid=0, messages=(), tokens=[1], answer=first)
        score = reward.score_one(prompt, Completion.of_text(0, 0, second))
        assert (vote([reward], first) == vote([reward], second)) == bool(score.correct), (first, second)


def test_a_whole_text_is_what_the_policy_wrote_itself():
    """Without the beginning that the prompt has, and without the stop string: equal answers are one vote."""
    for reward in (Exact(), Accuracy152(tag=None), Number(), Gsm8kReward()):
        votes = {vote([reward], "Of 3: 7 2.", "Of 3: ", " 2."), vote([reward], "Of 3: 7", "Of 3: ")}
        assert votes == {"7"}
    assert vote([Accuracy152()], "<answer>7</answer>", "<answer>", "</answer>") == "7"


def test_the_first_reward_that_can_tell_tells():
    assert vote([Format(pattern="x"), Number(), Gsm8kReward()], "#### 3 of 5") == "5"
    assert answer_extractor([Format(pattern="x")]) is None
    assert answer_extractor([]) is None


def test_a_reward_may_know_itself():
    @dataclass(frozen=True)
    class Last:
        def extract(self, text):
            return text.split()[-1] if text else None

    assert vote([Last(), Number()], "it is seven") == "seven"


def test_the_table_speaks_of_rewards_that_exist():
    assert set(ANSWER_EXTRACTORS) <= set(REWARDS)


HALVES = ["0.5", ".50", "1/2", r"\frac{1}{2}", r"\frac12", r"\dfrac 1 2", r"$\tfrac{1}{2}$", "{1/2}", "x = 1/2."]


@pytest.mark.parametrize("text", [*HALVES, r"\left.\frac12\right"])
def test_a_half_is_a_half(text):
    assert canonical(text) == Fraction(1, 2)


TOGETHER = {"1,000": "1000", "1,000.0": "1e3", "-3": "−3", "(1, 2)": "(1,2)", r"\text{ even }": "even"}
TOGETHER |= {r"90^\circ": "90", r"12\%": "12", "x = 12,345": "12345", r"1,234,567\text{ m}": r"1234567\text{ m}"}
APART = {r"2\frac12": "21/2", "1,2": "12", "x = 1,2345": "12345", "0.333": "1/3", "even": "odd", "1/0": "0"}
APART |= {"x+1": "1+x"}  # no algebra here: the reward judges, the vote compares


def test_what_votes_together():
    for table, same in ((TOGETHER, True), (APART, False)):
        assert {first: canonical(first) == canonical(table[first]) for first in table} == dict.fromkeys(table, same)
    assert [canonical(nothing) for nothing in (None, "", "  \n")] == [None] * 3


@pytest.mark.parametrize(
    "text", ["9" * 100_000, "{" * 5000, r"\frac" * 20_000, "\\text{" * 5000, "1e999", "1e-999", "\0", "\ud83d"]
)
def test_hostile_answers_are_compared_as_they_are(text):
    assert canonical(text) == canonical(text) and hash(canonical(text)) is not None
