"""Rewards that read the text itself: it equals the answer, matches a pattern, or has a match that equals the answer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxima.data import FieldError
from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import Job, PooledReward, WeightedReward, binary_score, missing_answer, required_answer
from proxima.reward.math.marked import same_answer, solution_hint


@dataclass(frozen=True, kw_only=True)
class Exact(WeightedReward):
    r"""1 if what the policy itself wrote, without outer whitespace, equals the answer, else 0; sets `correct`.

    Args:
        ignore_case: ignore upper and lower case.
    Returns: Score of value 0 or 1, `correct` set.
    Raises: ValueError if the row has no answer.
    Edge cases: the beginning that the prompt has of the answer, and a stop string that ended it, are not compared. An
        answer that is a whole solution, with `####` or text around a `\boxed{…}`, counts as unreadable,
        because no completion would equal it.
    """

    ignore_case: bool = False

    kind = "exact"
    needs_answer = True
    where = "inline"

    def unreadable_one(self, answer: object) -> str | None:
        return missing_answer(answer) or solution_hint(str(answer))

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        text = completion.own_text(prompt.begun).strip()
        expected = str(required_answer(prompt, self.kind)).strip()
        if self.ignore_case:
            return binary_score(text.casefold() == expected.casefold())
        return binary_score(text == expected)


@dataclass(frozen=True, kw_only=True)
class Format(PooledReward):
    r"""1 if the text matches `pattern`, else 0; does not set `correct`.

    Args:
        pattern: regular expression searched in the text; `.` matches newlines too, `^` and `$` match the ends of the
            text. The default is the think-then-answer format.
    Returns: Score of value 0 or 1.
    Raises: FieldError at construction for a pattern that doesn't compile.
    Edge cases: catastrophic backtracking invalidates only the completion that causes it, after the timeout.
    Source: completion pruning (arXiv 2503.22342) for the default.
    """

    pattern: str = r"^<think>.*?</think>\n<answer>.*?</answer>$"

    kind = "format"

    def __post_init__(self) -> None:
        super().__post_init__()
        compile_pattern(self.pattern)

    @property
    def text_patterns(self) -> tuple[str, ...]:
        return (self.pattern,)

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        return Job(grader="format", arguments={"pattern": self.pattern, "text": completion.text})


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled pattern; FieldError, with the position, if it is not a regular expression."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise FieldError("pattern", pattern, f"is not a regular expression: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Regex(PooledReward):
    r"""1 if the last match of `pattern` gives the answer, as a number or as text, else 0; sets `correct`.

    Args:
        pattern: regular expression; `.` matches newlines too. Its group `answer`, else its first group, else the whole
            match is compared.
    Returns: Score of value 0 or 1, `correct` set. No match: 0.
    Raises: FieldError at construction for a pattern that doesn't compile; ValueError if the row has no answer.
    """

    pattern: str = r"<answer>(.*?)</answer>"

    kind = "regex"
    needs_answer = True

    def __post_init__(self) -> None:
        super().__post_init__()
        compile_pattern(self.pattern)

    @property
    def text_patterns(self) -> tuple[str, ...]:
        return (self.pattern,)

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        required_answer(prompt, self.kind)
        return Job(grader="regex", arguments={"pattern": self.pattern, "text": completion.text})

    def answer_job(self, answer: object) -> Job | str | None:
        return missing_answer(answer) or solution_hint(str(answer))

    def parse_result(self, prompt: Prompt, result: Mapping[str, Any]) -> Score:
        answer = result["answer"]
        return binary_score(answer is not None and same_answer(answer, prompt.answer))
