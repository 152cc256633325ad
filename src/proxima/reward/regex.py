"""Compares what a pattern captures with the answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from proxima.data import Completion, Prompt, Score
from proxima.reward.base import Job, PooledReward, binary_score, required_answer
from proxima.reward.format import compile_pattern
from proxima.reward.math.extract import same_answer


@dataclass(frozen=True, kw_only=True)
class Regex(PooledReward):
    r"""1 if the last capture of `pattern` equals the answer, as a number or as text, else 0; sets `correct`.

    Args:
        pattern: regular expression, `.` matches newlines too; its group `answer`, else its first group, else the whole
            match is compared.
    Returns: Score of value 0 or 1, `correct` set. No match: 0.
    Raises: FieldError at construction for a pattern that doesn't compile; ValueError if the row has no answer.
    """

    pattern: str = r"<answer>(.*?)</answer>"

    kind: ClassVar[str] = "regex"
    needs_answer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        compile_pattern(self.pattern)

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        required_answer(prompt, self.kind)
        return Job(grader="regex", arguments={"pattern": self.pattern, "text": completion.text})

    def parse_result(self, prompt: Prompt, result: Mapping[str, Any]) -> Score:
        answer = result["answer"]
        return binary_score(answer is not None and same_answer(answer, prompt.answer))
