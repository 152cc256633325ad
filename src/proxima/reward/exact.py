"""Compares the whole text with the answer."""

from dataclasses import dataclass

from proxima.data import Completion, Prompt, Score
from proxima.reward.base import WeightedReward, binary_score, required_answer


@dataclass(frozen=True, kw_only=True)
class Exact(WeightedReward):
    """1 if the whole text, without outer whitespace, equals the answer, else 0; sets `correct`.

    Args:
        ignore_case: ignore upper and lower case.
    Returns: Score of value 0 or 1, `correct` set.
    Raises: ValueError if the row has no answer.
    """

    ignore_case: bool = False

    kind = "exact"
    needs_answer = True
    where = "inline"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        text, expected = completion.text.strip(), str(required_answer(prompt, self.kind)).strip()
        return binary_score(text.casefold() == expected.casefold() if self.ignore_case else text == expected)
