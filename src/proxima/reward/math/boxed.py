r"""The last `\boxed{…}`."""

from dataclasses import dataclass
from typing import ClassVar

from proxima.data import Completion, Prompt, Score
from proxima.reward.base import WeightedReward, binary_score, required_answer
from proxima.reward.math.extract import last_boxed, same_answer
from proxima.reward.protocol import Where


@dataclass(frozen=True, kw_only=True)
class Boxed(WeightedReward):
    r"""1 if the last `\boxed{…}` holds the answer, as a number or as the same text, else 0; sets `correct`.

    Returns: Score of value 0 or 1, `correct` set. No box, or an unclosed one: 0.
    Raises: ValueError if the row has no answer.
    Differs: `math` accepts 1/2 for 0.5; this compares numbers and text only, and needs no worker.
    """

    kind: ClassVar[str] = "boxed"
    needs_answer: ClassVar[bool] = True
    where: ClassVar[Where] = "inline"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        answer = required_answer(prompt, self.kind)
        found = last_boxed(completion.text)
        return binary_score(found is not None and same_answer(found, answer))
