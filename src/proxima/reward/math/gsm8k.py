"""GSM8K's form of an answer: a number after `####`."""

from dataclasses import dataclass
from typing import Any, ClassVar

from proxima.data import Completion, Prompt, Score
from proxima.reward.base import WeightedReward, binary_score, missing_answer, required_answer
from proxima.reward.math.extract import as_number, first_number, last_number
from proxima.reward.protocol import Where


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

    kind: ClassVar[str] = "gsm8k"
    needs_answer: ClassVar[bool] = True
    where: ClassVar[Where] = "inline"

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
