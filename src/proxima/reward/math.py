"""Mathematical equality, by math-verify in worker processes."""

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from proxima.data import Completion, Prompt, Score, require
from proxima.reward.base import Job, PooledReward, answer_of, missing, needs_package, verdict
from proxima.reward.text import as_fraction, last_boxed, last_tagged

_MAX_DIGITS, _MAX_DEPTH, _MAX_EXPONENT = 400, 30, 9999
_DIGITS = re.compile(rf"([0-9]{{{_MAX_DIGITS}}})[0-9]+")
_PERIOD = re.compile(r"(?<![.\s])\.\s*\Z")
_BRACKET = re.compile(r"[()\[\]{}]")
_EXPONENT = re.compile(r"(?:\^|\*\*)[\s({]*[-+]?([0-9]+)(?:[\s)}]*(?:\^|\*\*)[\s({]*([0-9]+))?")
_BINOMIAL = re.compile(r"binom\s*(?:\{[^{}]*\}\s*)?\{[^{}]*(?:\^|[0-9]{6})")
_FACTORIAL = re.compile(r"[0-9]{5}[\s})]*!|\^[\s({]*[0-9]+[\s})]*!|![\s})]*![\s})]*!")


@dataclass(frozen=True, kw_only=True)
class Math(PooledReward):
    r"""1 if math-verify holds the final answer equal to the row's answer, else 0; says whether it is correct.

    What is judged is the last `\boxed{…}`, else the last `<answer>…</answer>`, else what math-verify finds in the last `max_chars`
    characters (formulas between `$`, then plain numbers). A final period in the box counts for nothing. An answer that math-verify can't
    read is wrong. One that it can't finish is invalid, never 0: the worker is ended and replaced, and nobody else pays. Brackets nested
    over 30 deep, powers with an exponent over 9,999 and factorials or binomials of such size are not evaluated at all (invalid too). Of a
    run of over 400 digits the first 400 count.

    Args:
        cpu_seconds: CPU time for one completion, in seconds, > 0; the runner's time-out on the clock holds beside it.
        max_chars: characters of a marked answer at most, or of the end of a text without one; >= 16.
        weight: factor of the value in the sum of the rewards.
        name: key among the parts; none: `math`.
    Returns: Score of value 0 or 1, `correct` set.
    Raises: ValueError where the row's answer is missing or can't be read as mathematics.
    Source: the math-verify package, 0.9.
    Differs: verl and TRL call it in their own process, where its alarm-based time-out raises in threads, and turn a failure into 0.
    """

    cpu_seconds: float = 1.0
    max_chars: int = 2000

    kind: ClassVar[str] = "math"
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_package("math_verify", self.kind, "math")
        require(self.cpu_seconds > 0, "cpu_seconds", self.cpu_seconds, "must be > 0 seconds")
        require(self.max_chars >= 16, "max_chars", self.max_chars, "must be >= 16")

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        answer = shortened(str(answer_of(prompt, self.kind)))
        found = last_boxed(completion.text)
        if found is None:
            found = last_tagged(completion.text, "answer")
        if found is not None:
            found = _PERIOD.sub("", found)  # math-verify takes 42. for another answer than 42
        if found is not None and (right := plainly_equal(found, answer)) is not None:
            return verdict(right)
        judged = shortened(completion.text[-self.max_chars :] if found is None else found)
        for what, formula in (("row's answer", answer), ("answer", judged)):
            if problem := self._unevaluable(formula):
                raise ValueError(f"{what} not evaluated: {problem}")
        text = judged if found is None else f"\\boxed{{{judged}}}"
        return Job(grader="math", arguments={"answer": answer, "text": text}, cpu_seconds=self.cpu_seconds)

    def reading(self, answer: Any) -> Job | str | None:
        if answer is None:
            return missing(answer)
        formula = shortened(str(answer))
        if as_fraction(formula) is not None:  # integers and fractions, most rows of most data: no worker needed
            return None
        if problem := self._unevaluable(formula):
            return f"not evaluated: {problem}"
        return Job(grader="math_answer", arguments={"answer": formula}, cpu_seconds=self.cpu_seconds)

    def _unevaluable(self, formula: str) -> str | None:
        return f"more than {self.max_chars} characters" if len(formula) > self.max_chars else unevaluable(formula)


def shortened(formula: str) -> str:
    """Runs of digits cut to 400: no sensible answer has more, and a model that repeats a digit without end is plainly wrong."""
    return _DIGITS.sub(r"\1", formula)


def plainly_equal(found: str, answer: str) -> bool | None:
    """The verdict where it needs no algebra: the same text, or two integers or fractions of integers. None: it does."""
    if found.strip() == answer.strip() != "":
        return True
    left, right = as_fraction(found), as_fraction(answer)
    return None if left is None or right is None else left == right


def unevaluable(formula: str) -> str | None:
    """Why a formula would take a computer algebra system out of any bounds, or None. Linear time; what it misses meets the time-out."""
    depth = deepest = 0
    for bracket in _BRACKET.finditer(formula):
        depth = max(0, depth + (1 if bracket.group() in "([{" else -1))
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        return f"brackets nested {deepest} deep"
    for power in _EXPONENT.finditer(formula):
        exponent, tower = int(power[1]), int(power[2] or 1)
        if exponent > _MAX_EXPONENT or (exponent > 1 and tower * math.log10(exponent) > math.log10(_MAX_EXPONENT)):
            return f"an exponent of more than {_MAX_EXPONENT}"
    if _FACTORIAL.search(formula) or _BINOMIAL.search(formula):
        return "a factorial or binomial without bounds"
    return None
