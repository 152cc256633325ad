"""Compares the whole text with the answer."""

from dataclasses import dataclass
from typing import Any

from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import WeightedReward, binary_score, missing_answer, required_answer
from proxima.reward.math.marked import solution_hint


@dataclass(frozen=True, kw_only=True)
class Exact(WeightedReward):
    r"""1 if the whole text, without outer whitespace, equals the answer, else 0; sets `correct`.

    Args:
        ignore_case: ignore upper and lower case.
    Returns: Score of value 0 or 1, `correct` set.
    Raises: ValueError if the row has no answer.
    Edge cases: an answer that is a whole solution, with `####` or text around a `\boxed{…}`, counts as unreadable: no
        completion equals it.
    """

    ignore_case: bool = False

    kind = "exact"
    needs_answer = True
    where = "inline"

    def unreadable_one(self, answer: Any) -> str | None:
        return missing_answer(answer) or solution_hint(str(answer))

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        text, expected = completion.text.strip(), str(required_answer(prompt, self.kind)).strip()
        return binary_score(text.casefold() == expected.casefold() if self.ignore_case else text == expected)
