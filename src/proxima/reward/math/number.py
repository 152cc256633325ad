"""The reward that compares the last number of a text with the answer. `marked` has those of marked places."""

from dataclasses import dataclass
from typing import Any

from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import WeightedReward, binary_score, missing_answer, required_answer
from proxima.reward.math.extract import as_number, last_number
from proxima.reward.math.marked import solution_hint

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
