"""The whole text."""

from dataclasses import dataclass
from typing import ClassVar

from proxima.data import Completion, Prompt, Score
from proxima.reward.base import WeightedReward, binary_score, required_answer
from proxima.reward.protocol import Where


@dataclass(frozen=True, kw_only=True)
class Exact(WeightedReward):
    """1 if the whole text, outer space removed, equals the answer; says whether it is correct.

    Args:
        ignore_case: compare without regard to upper and lower case.
        weight: factor of the value in the sum of the rewards.
        name: key among the parts; none: `exact`.
    Returns: Score of value 0 or 1, `correct` set.
    Raises: ValueError where the row has no answer.
    """

    ignore_case: bool = False

    kind: ClassVar[str] = "exact"
    needs_answer: ClassVar[bool] = True
    where: ClassVar[Where] = "inline"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        found, expected = completion.text.strip(), str(required_answer(prompt, self.kind)).strip()
        return binary_score(found.casefold() == expected.casefold() if self.ignore_case else found == expected)
