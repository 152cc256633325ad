"""Reward `math`: compares numbers and words in this process, and formulas by math-verify in a worker."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from proxima.data import Completion, Prompt, Score, require
from proxima.reward.base import binary_score, missing_answer, required_answer
from proxima.reward.math.answer_text import (
    as_interval,
    equation_sides,
    find_unmarked_answer,
    is_prose,
    normalize_words,
    parse_words,
    unfinished_operation,
    words_after_marker,
)
from proxima.reward.math.marked import last_boxed, last_tagged
from proxima.reward.math.numeric_answer import WrittenNumber, parse_number, same_number
from proxima.reward.pooled import Job, PooledReward
from proxima.system.packages import require_package

_MAX_DIGITS, _MAX_DEPTH, _MAX_EXPONENT = 400, 30, 9999
_DIGITS = re.compile(rf"[0-9]{{{_MAX_DIGITS + 1}}}")
_PERIOD = re.compile(r"(?<![.\s])\.\s*\Z")
_BRACKET = re.compile(r"[()\[\]{}]")
_EXPONENT = re.compile(r"(?:\^|\*\*)[\s({]*[-+]?([0-9]+)(?:[\s)}]*(?:\^|\*\*)[\s({]*([0-9]+))?")
_BINOMIAL = re.compile(r"binom\s*(?:\{[^{}]*\}\s*)?\{[^{}]*(?:\^|[0-9]{6})")
_FACTORIAL = re.compile(r"[0-9]{5}[\s})]*!|\^[\s({]*[0-9]+[\s})]*!|![\s})]*![\s})]*!")


@dataclass(frozen=True, kw_only=True)
class Math(PooledReward):
    r"""1 if the final answer equals the row's answer, else 0; sets `correct`.

    The final answer is the last `\boxed{…}`, else the last `<answer>…</answer>`, else, of the last `max_chars`
    characters, the formula between `$` or the plain number after the last `answer is` or `Answer:`, else the last of
    either. An unclosed box is wrong. What counts as equal depends on the row's answer:

    - A plain number. The answer must be one in final form: an integer, decimal, fraction, mixed number, percent,
      `3\times 10^5`, with unit, currency, sign, or a name before it (`x = 61`). An unfinished operation (`54+7`,
      `2^{10}`, `\frac{122}{2}`, an integral, a root, a factorial) is wrong, whatever its value, and so are `60=61` and
      two numbers. A fraction need not be in lowest terms. Of `54+7=61` the last side counts, if the sides that plain
      arithmetic can evaluate agree. 50 % is 50 and 0.5; decimals of six places or more are compared rounded.
    - Words (`\text{even}`, `Monday`): the same words, in any case and font. Several words must be in `\text{…}`.
    - Anything else (`2\sqrt{3}`, `x^2+1`, `[0,5]`): math-verify must accept every side of an equality. An integral, sum
      or product over an index, limit or derivative is wrong unless the row's answer has one; so is a run of over 400
      digits. `0 \le x < 5` is `[0,5)`.

    A final period is ignored. An answer that math-verify can't parse is wrong; one that it can't finish is invalid,
    never 0: the worker is killed and replaced, and no other completion is affected. Brackets nested over 30 deep,
    powers with an exponent over 9,999 and factorials or binomials of such size are not evaluated; they are invalid too.

    Args:
        cpu_seconds: CPU time for one completion, in seconds, > 0; the runner's wall-clock timeout applies as well.
        max_chars: maximum length of a marked answer, or of the end that is read of a text without one; >= 16.
    Returns: Score of value 0 or 1, `correct` set.
    Raises: ValueError if the row's answer is missing, is prose, or can't be read as mathematics.
    Source: the math-verify package, 0.9.
    Differs: math-verify, and verl and TRL that call it, evaluate whatever they find in a text, so that repeating the
        question (`54+7`) is an answer, and read words as products of letters. verl and TRL call it in their own
        process, where its alarm-based timeout raises in threads, and turn a failure into 0.
    """

    cpu_seconds: float = 1.0
    max_chars: int = 2000

    kind = "math"
    warm_up = "proxima.reward.workers.graders:warm_math"
    needs_answer = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.cpu_seconds > 0, "cpu_seconds", self.cpu_seconds, "must be > 0 seconds")
        require(self.max_chars >= 16, "max_chars", self.max_chars, "must be >= 16")

    def check(self) -> None:
        require_package("math_verify", f"reward '{self.kind}' needs", "proxima-rl[math]")

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        answer = str(required_answer(prompt, self.kind))
        reference = _parse_reference(answer)
        if isinstance(reference, str):
            return binary_score(reference in map(normalize_words, self._candidates(completion.text, words=True)))
        candidates = self._candidates(completion.text, number=reference is not None)
        if any(_PERIOD.sub("", text).strip() == answer.strip() != "" for text in candidates[:1]):
            return binary_score(True)
        if reference is not None:
            number = next((number for text in candidates if (number := parse_number(text)) is not None), None)
            return binary_score(number is not None and number.finished and same_number(reference, number))
        return self._by_algebra(answer, candidates[0] if candidates else "")

    def _by_algebra(self, answer: str, formula: str) -> Job:
        formula = as_interval(_PERIOD.sub("", formula), answer)  # to math-verify, 42. is not 42
        if problem := self._unevaluable(answer):
            raise ValueError(f"row's answer not evaluated: {problem}")
        if _DIGITS.search(formula) or unfinished_operation(formula, answer):
            formula = ""  # wrong, provided the row's answer can be parsed
        if problem := self._unevaluable(formula):
            raise ValueError(f"answer not evaluated: {problem}")
        texts = [f"\\boxed{{{side}}}" for side in equation_sides(formula, answer)]
        return Job(grader="math", arguments={"answer": answer, "texts": texts}, cpu_seconds=self.cpu_seconds)

    def _candidates(self, text: str, number: bool = False, words: bool = False) -> list[str]:
        """The final answer of the text: candidates in the order in which they are tried."""
        if (boxed := last_boxed(text)) is not None:
            return [boxed]
        if "\\boxed{" in text or "\\fbox{" in text:
            return []
        tagged, end = last_tagged(text, "answer"), text[-self.max_chars :]
        if words:
            return [words_after_marker(end) if tagged is None else tagged]
        unmarked = find_unmarked_answer(end if tagged is None else tagged[-self.max_chars :], number)
        return [text for text in (tagged, unmarked) if text is not None]

    def answer_job(self, answer: Any) -> Job | str | None:
        if answer is None:
            return missing_answer(answer)
        formula = str(answer)
        try:
            if _parse_reference(formula) is not None:  # most rows of most data: no worker needed
                return None
        except ValueError as error:
            return str(error)
        if problem := self._unevaluable(formula):
            return f"not evaluated: {problem}"
        return Job(grader="math_answer", arguments={"answer": formula}, cpu_seconds=self.cpu_seconds)

    def _unevaluable(self, formula: str) -> str | None:
        if _DIGITS.search(formula):
            return f"a run of more than {_MAX_DIGITS} digits"
        return f"more than {self.max_chars} characters" if len(formula) > self.max_chars else unevaluable(formula)


@lru_cache(maxsize=4096)
def _parse_reference(answer: str) -> WrittenNumber | str | None:
    """The row's answer as a plain number or as words; None if it needs algebra. ValueError if it is prose."""
    number = None if re.match(r"\s*(?:\\left)?\(.*,", answer, re.DOTALL) else parse_number(answer)  # (1,000) is a point
    if number is not None:
        return number
    words = parse_words(answer)
    if words is None and is_prose(answer):
        raise ValueError("is prose, not mathematics; write words as \\text{…}, or use 'exact'")
    return words


def unevaluable(formula: str) -> str | None:
    """The reason why evaluating a formula may take unbounded time, or None. Runs in linear time; the timeout covers the
    formulas that this misses."""
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
