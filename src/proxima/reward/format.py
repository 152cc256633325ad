"""The shape of the text."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from proxima.data import Completion, FieldError, Prompt, Score
from proxima.reward.base import Job, PooledReward


@dataclass(frozen=True, kw_only=True)
class Format(PooledReward):
    r"""1 if the text has the shape of `pattern`, else 0; says nothing of correctness.

    Args:
        pattern: regular expression searched in the text; `.` matches line ends too. The default is the
            think-then-answer shape, and the anchors `^` and `$` are the ends of the text.
        weight: factor of the value in the sum of the rewards.
        name: key among the parts; none: `format`.
    Returns: Score of value 0 or 1.
    Raises: ValueError at construction for a pattern that doesn't compile.
    Edge cases: a pattern that backtracks without end on some text costs that completion alone, after the time-out.
    Source: completion pruning (arXiv 2503.22342) for the default.
    """

    pattern: str = r"^<think>.*?</think>\n<answer>.*?</answer>$"

    kind: ClassVar[str] = "format"

    def __post_init__(self) -> None:
        super().__post_init__()
        compile_pattern(self.pattern)

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        return Job(grader="format", arguments={"pattern": self.pattern, "text": completion.text})

    def parse_result(self, prompt: Prompt, result: Mapping[str, Any]) -> Score:
        return Score(value=float(result["value"]))


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled pattern.

    Raises:
        ValueError: it is no regular expression; names the place.
    """
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as problem:
        raise FieldError("pattern", pattern, f"is not a regular expression: {problem}") from None
