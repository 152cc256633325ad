"""Rewards that compare numbers and text, but no formulas. `marked` has those for marked answers."""

import re
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from proxima.data import require
from proxima.data.flow import Completion, Prompt, Score, prompt_name
from proxima.reward.base import WeightedReward, binary_score, missing_answer, required_answer
from proxima.reward.math.marked import (
    JOINS_ANOTHER,
    NUMBER,
    as_fraction,
    as_number,
    last_boxed,
    last_number,
    last_tagged,
    number_at,
    solution_hint,
)

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

    def unreadable_one(self, answer: object) -> str | None:
        missing = missing_answer(answer)
        if missing or as_number(answer) is not None:
            return missing
        return solution_hint(str(answer)) or NOT_A_NUMBER

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        answer = required_answer(prompt, self.kind)
        expected = as_number(answer)
        if expected is None:
            raise ValueError(f"answer {answer!r:.80} of {prompt_name(prompt.uid)} is {NOT_A_NUMBER}")
        return binary_score(last_number(completion.own_text(prompt.begun)) == expected)


@dataclass(frozen=True, kw_only=True)
class Accuracy152(WeightedReward):
    """2 if the tagged answer is exactly the row's answer, 1.5 if it states the same number, else 0; sets `correct`.

    The answer is the contents of the last `<tag>…</tag>` without outer whitespace. The number that it states is its
    only one, or the last one: 18 of `The answer is 18.`, `Total: 18`, `9 * 2 = 18`, `18%`, `**18**` and `18 dollars`.
    It states none where the number is part of a formula (`2 x`, `x + 1`), one of several answers (`17 or 18`), denied,
    or changed by a word (`2 dozens`, `5 squared`, `3 fifths`). The row's answer may be a whole GSM8K solution; the text
    after its `####` counts.

    Args:
        tag: name of the tag around the answer; null: the whole text is the answer.
    Returns: Score of value 2, 1.5 or 0; `correct` is true for the first two. No tag, or an empty one: 0.
    Raises: ValueError if the row has no answer.
    Source: completion pruning (arXiv 2503.22342), whose other reward is `format` of weight 1: a correct answer in the
        right format gets 3.
    Differs: its parser takes the only number in the tag whatever surrounds it (`x + 1` is 1, `2 million` is 2); where
        there are several, its verl recipe takes the last number of the completion, and its other trainer none. It
        removes commas before it compares, so that `1,000` gets 2 for 1000; here 1.5.
    """

    tag: str | None = "answer"

    kind = "accuracy_1_5_2"
    needs_answer = True
    where = "inline"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tag is None or self.tag.isidentifier(), "tag", self.tag, "must be a plain name such as 'answer'")

    def unreadable_one(self, answer: object) -> str | None:
        return missing_answer(answer) or (None if "####" in str(answer) else solution_hint(str(answer)))

    @property
    def text_patterns(self) -> tuple[str, ...]:
        if self.tag is None:
            return ()
        return (f"<{self.tag}>.*?</{self.tag}>",)

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        expected = str(required_answer(prompt, self.kind)).rpartition("####")[2].strip()
        own = completion.own_text(prompt.begun)
        answer = own if self.tag is None else last_tagged(completion.text, self.tag)
        answer = "" if answer is None else answer.strip()
        if answer == expected:
            if answer:
                return Score(value=2.0, correct=True)
            return Score(value=0.0, correct=False)
        right = _same_number(answer, expected)
        return Score(value=1.5 if right else 0.0, correct=right)


# What introduces an answer: the text after the last of these states it
_INTRODUCES = re.compile(r"[=:≈]|\b(?:is|are|was|were|equals)\b")
_MARKUP = re.compile(r"\*\*|__|`|\\[()\[\]]|\\?%")
_TWO_SIGNS = re.compile(r"\$?[-+\u2212]\$?[-+\u2212]")
_DENIES = re.compile(
    r"(?i:\b(?:not|never|neither|either|between|minus|negative|plus|than|at most|at least)\b|n['’]t\b)"
)
_OPERATES_BEFORE = re.compile(r"(?:[\w)\]}] {0,3}[-+\u2212][ $]{0,3}|[*/^×÷\\{\[][ $]{0,3}|\w\(?\$?)$")
_STANDS_ALONE = re.compile(r"[.,;:!?)$]{0,3}(?!\S)(?!\s{0,3}[-+*/^×÷=\u2212])")
_NEAR = 80  # characters around a number in which a word may change it
# Scales, fractions, further numbers, operators, doubts; any single letter but `a`: an unknown, or a scale (`1 k`)
_CHANGES_VALUE = re.compile(
    r"\b(?:(?:dozen|gross|score|lakh|crore|mil|mn|mio|bn|pi|half|halve|third|quarter|fifth|eighth|ninth|twelfth"
    r"|zero|one|two|three|five|eight|nine|twelve|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ie|ieth)"
    r"|(?:four|six|seven|ten|eleven|(?:thir|four|fif|six|seven|eigh|nine)teen|hundred|thousand|(?:m|b|tr|quadr)illion)(?:th)?)s?"
    r"|plus|minus|divided|multiplied|squared|cubed|factorial|power|root|mod|modulo|choose|doubled|tripled|halved"
    r"|maybe|perhaps|possibly|probably|unless|negative|negated|inverse|below|than|or|not|never|[b-z])\b",
    re.IGNORECASE,
)


def _same_number(answer: str, expected: str) -> bool:
    right = _number(expected)
    return right is not None and _stated_number(answer) == right


def _stated_number(answer: str) -> Decimal | Fraction | None:
    """The number that a text states as its answer; None if it states none."""
    boxed = last_boxed(answer)
    text = _MARKUP.sub("", answer if boxed is None else boxed).strip()
    stated = _INTRODUCES.split(text)[-1].strip()
    if NUMBER.search(stated) is None:
        stated = text
    if _TWO_SIGNS.match(stated):
        return None
    whole = _number(stated)
    return _last_in_words(stated) if whole is None else whole


def _last_in_words(text: str) -> Decimal | None:
    """The last number of a text; None if another one is joined to it, if it is an operand, denied or changed."""
    numbers = deque(NUMBER.finditer(text), maxlen=2)
    if not numbers:
        return None
    number = numbers[-1]
    if len(numbers) == 2 and JOINS_ANOTHER.match(text, numbers[0].end()):
        return None
    before = text[: number.start()][-_NEAR:]
    after = text[number.end() :][:_NEAR]
    if _OPERATES_BEFORE.search(before) or not _STANDS_ALONE.match(after):
        return None
    if _DENIES.search(before) or _CHANGES_VALUE.search(after):
        return None
    return number_at(text, number)


def _number(text: str) -> Decimal | Fraction | None:
    number = as_number(text)
    return as_fraction(text) if number is None else number
