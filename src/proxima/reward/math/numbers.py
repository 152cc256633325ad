"""Rewards that compare numbers and text, but no formulas. `marked` has those for marked answers."""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from proxima.data import require
from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import WeightedReward, binary_score, missing_answer, required_answer
from proxima.reward.math.marked import as_fraction, as_number, last_number, last_tagged, solution_hint

NOT_A_NUMBER = "not a number; use 'exact' or 'math'"


@dataclass(frozen=True, kw_only=True)
class Number(WeightedReward):
    """1 if the last number in the text equals the answer, else 0; sets `correct`.

    Reads signs, thousands commas, `$`, decimals and exponents; a final period is ignored. The comparison is exact
    (decimal), so 0.50 is 0.5 and 0.333 is not 1/3. Fractions and formulas need `math`.

    Returns: Score of value 0 or 1, `correct` set. No number in the text: 0.
    Raises: ValueError if the row's answer is missing or not a number.
    """

    kind = "number"
    needs_answer = True
    where = "inline"

    def unreadable_one(self, answer: Any) -> str | None:
        if (missing := missing_answer(answer)) or as_number(answer) is not None:
            return missing
        return solution_hint(str(answer)) or NOT_A_NUMBER

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        answer = required_answer(prompt, self.kind)
        if (expected := as_number(answer)) is None:
            raise ValueError(f"answer {answer!r:.80} of prompt {prompt.uid} is {NOT_A_NUMBER}")
        return binary_score(last_number(completion.text) == expected)


@dataclass(frozen=True, kw_only=True)
class Accuracy152(WeightedReward):
    """2 if the tagged answer is exactly the row's answer, 1.5 if both are the same number, else 0; sets `correct`.

    The answer is the contents of the last `<tag>…</tag>` without outer whitespace. `18.0`, `$18`, `1,000`, `1/2`,
    `x = 18` and a number followed by words (`18 dollars`) are numbers, unless a word changes the value: `2 dozens`,
    `5 squared`, `3 fifths`, `2 x`. The row's answer may be a whole GSM8K solution; the text after its `####` counts.

    Args:
        tag: name of the tag around the answer; null: the whole text is the answer.
    Returns: Score of value 2, 1.5 or 0; `correct` is true for the first two. No tag, or an empty one: 0.
    Raises: ValueError if the row has no answer.
    Source: completion pruning (arXiv 2503.22342), whose other reward is `format` of weight 1: a correct answer in the
        right format gets 3.
    Differs: its parser takes the only number in a text, whatever surrounds it: `x + 1` is 1, `2 million` is 2, and
        `1,000` is two numbers and therefore wrong. Here formulas are not numbers, and 1,000 is 1000.
    """

    tag: str | None = "answer"

    kind = "accuracy_1_5_2"
    needs_answer = True
    where = "inline"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tag is None or self.tag.isidentifier(), "tag", self.tag, "must be a plain name such as 'answer'")

    def unreadable_one(self, answer: Any) -> str | None:
        return missing_answer(answer) or (None if "####" in str(answer) else solution_hint(str(answer)))

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        expected = str(required_answer(prompt, self.kind)).rpartition("####")[2].strip()
        answer = completion.text if self.tag is None else last_tagged(completion.text, self.tag)
        answer = "" if answer is None else answer.strip()
        if answer == expected:
            return Score(value=2.0, correct=True) if answer else Score(value=0.0, correct=False)
        right = _same_number(answer, expected)
        return Score(value=1.5 if right else 0.0, correct=right)


# `x = 18`, `18 dollars`: a number in text that does not change it
_NUMBER_IN_TEXT = re.compile(
    r"(?:[A-Za-z]{1,20}\s{0,3}=\s{0,3})?(?P<number>(?!\$?[-+\u2212]\$?[-+\u2212])[^\s=]{1,400})"
    r"(?:\s(?P<words>[A-Za-z][A-Za-z .]{0,80}))?"
)
# Scales, fractions, further numbers, operators, doubts; any single letter but `a`: an unknown, or a scale (`1 k`)
_CHANGES_VALUE = re.compile(
    r"\b(?:(?:dozen|gross|score|lakh|crore|mil|mn|mio|bn|pi|half|halve|third|quarter|fifth|eighth|ninth|twelfth"
    r"|zero|one|two|three|five|eight|nine|twelve|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ie|ieth)"
    r"|(?:four|six|seven|ten|eleven|(?:thir|four|fif|six|seven|eigh|nine)teen|hundred|thousand|(?:m|b|tr|quadr)illion)(?:th)?)s?"
    r"|plus|minus|percent|percentage|divided|multiplied|squared|cubed|factorial|power|root|mod|modulo|choose|doubled|tripled|halved"
    r"|maybe|perhaps|possibly|probably|unless|negative|negated|inverse|below|than|or|not|never|[b-z])\b",
    re.IGNORECASE,
)


def _same_number(answer: str, expected: str) -> bool:
    right = _number(expected)
    match = _NUMBER_IN_TEXT.fullmatch(answer)
    if right is None or match is None or _CHANGES_VALUE.search(match["words"] or ""):
        return False
    return _number(match["number"]) == right


def _number(text: str) -> Decimal | Fraction | None:
    number = as_number(text)
    return as_fraction(text) if number is None else number
