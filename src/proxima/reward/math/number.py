r"""Rewards that compare numbers and text only: the last number, the one after `####`, the contents of `\boxed{…}`."""

from dataclasses import dataclass
from typing import Any

from proxima.data import Completion, Prompt, Score
from proxima.reward.base import WeightedReward, binary_score, missing_answer, required_answer
from proxima.reward.math.extract import as_number, first_number, last_boxed, last_number, same_answer


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

    def unreadable(self, answer: Any) -> str | None:
        is_number = as_number(answer) is not None
        return missing_answer(answer) or (None if is_number else "not a number; use 'exact' or 'math'")

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        answer = required_answer(prompt, self.kind)
        expected = as_number(answer)
        if expected is None:
            raise ValueError(f"answer {answer!r:.80} of prompt {prompt.uid} is not a number; use 'exact' or 'math'")
        return binary_score(last_number(completion.text) == expected)


@dataclass(frozen=True, kw_only=True)
class Gsm8kReward(WeightedReward):
    """1 if the number after the last `####` equals the answer; without `####`, the last number of the text.

    The row's answer may be a whole GSM8K solution; what follows its `####` counts.

    Args:
        strict: count a text without `####` as wrong.
    Returns: Score of value 0 or 1, `correct` set.
    Raises: ValueError if the row's answer is missing or not a number.
    Source: Cobbe et al., arXiv 2110.14168: solutions end in `#### number`.
    """

    strict: bool = False

    kind = "gsm8k"
    needs_answer = True
    where = "inline"

    def unreadable(self, answer: Any) -> str | None:
        is_number = as_number(str(answer).rpartition("####")[2]) is not None
        return missing_answer(answer) or (None if is_number else "not a number after '####'")

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        answer = required_answer(prompt, self.kind)
        expected = as_number(str(answer).rpartition("####")[2])
        if expected is None:
            raise ValueError(f"answer {answer!r:.80} of prompt {prompt.uid} is not a number after '####'")
        _, marker, final = completion.text.rpartition("####")
        if marker:
            return binary_score(first_number(final) == expected)
        return binary_score(not self.strict and last_number(completion.text) == expected)


@dataclass(frozen=True, kw_only=True)
class Boxed(WeightedReward):
    r"""1 if the last `\boxed{…}` holds the answer, as a number or as the same text, else 0; sets `correct`.

    Returns: Score of value 0 or 1, `correct` set. No box, or an unclosed one: 0.
    Raises: ValueError if the row has no answer.
    Differs: `math` accepts 1/2 for 0.5; this compares numbers and text only, and needs no worker.
    """

    kind = "boxed"
    needs_answer = True
    where = "inline"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        answer = required_answer(prompt, self.kind)
        boxed = last_boxed(completion.text)
        return binary_score(boxed is not None and same_answer(boxed, answer))
