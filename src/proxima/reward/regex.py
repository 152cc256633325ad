"""What a pattern finds in the text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from proxima.data import Completion, Prompt, Score
from proxima.reward.base import Job, PooledReward, answer_of, verdict
from proxima.reward.extract import same_answer
from proxima.reward.format import compiled


@dataclass(frozen=True, kw_only=True)
class Regex(PooledReward):
    r"""1 if what `pattern` captures last equals the answer, as a number or as text; says whether it is correct.

    Args:
        pattern: regular expression, `.` matches line ends too; its group `answer`, else its first group, else the whole
            match is compared.
        weight: factor of the value in the sum of the rewards.
        name: key among the parts; none: `regex`.
    Returns: Score of value 0 or 1, `correct` set. No match: 0.
    Raises: ValueError at construction for a pattern that doesn't compile; where the row has no answer.
    """

    pattern: str = r"<answer>(.*?)</answer>"

    kind: ClassVar[str] = "regex"
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        compiled(self.pattern)

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        answer_of(prompt, self.kind)
        return Job(grader="regex", arguments={"pattern": self.pattern, "text": completion.text})

    def read(self, prompt: Prompt, result: Mapping[str, Any]) -> Score:
        found = result["found"]
        return verdict(found is not None and same_answer(found, prompt.answer))
