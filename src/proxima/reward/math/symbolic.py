"""Reward `math`: compares numbers and words in this process, and formulas by math-verify in a worker."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from proxima.data import require
from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import Job, PooledReward, binary_score, missing_answer, required_answer
from proxima.reward.math.answer_text import (
    Choice,
    chosen_letter,
    equation_sides,
    find_unmarked_answer,
    is_equation,
    is_prose,
    normalize_words,
    only_text,
    parse_choice,
    parse_words,
    unfinished_operation,
    words_after_marker,
)
from proxima.reward.math.marked import last_boxed, last_tagged, row_answer
from proxima.reward.math.notation import (
    SETS_IN_WORDS,
    as_same_kind,
    normalize_formula,
    same_text,
    without_range,
    without_words,
)
from proxima.reward.math.numeric_answer import (
    DOTS,
    WrittenNumber,
    asked_number,
    is_sum_of_names,
    parse_number,
    same_number,
)
from proxima.system.user_modules import require_package

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

    The final answer is the last `\boxed{…}`, else the last `<answer>…</answer>`, else, in the last `max_chars`
    characters, the formula between `$` or the plain number after the last `answer is`, `Answer:` or `####`, else the
    last of either. An unclosed box is wrong, and so are alternatives (`61 or 62`) and an answer that ends in dots. The
    criterion of equality depends on the row's answer:

    - A plain number. The answer must be one in final form: an integer, decimal, fraction, mixed number, percent,
      `3\times 10^5`, with unit, currency, sign, or a name before it (`x = 61`, `m+n = 61`; an expression with
      numbers only if the question asks for it). An unfinished operation (`54+7`, `2^{10}`, `\frac{122}{2}`, an
      integral, a root, a factorial) is wrong, whatever its value, and so are `60=61` and two numbers. A fraction need
      not be in lowest terms. Of `54+7=61` the last side counts, if the sides that plain arithmetic can evaluate agree.
      50 % is 50 and 0.5; decimals of six places or more are compared rounded, to at
      least five significant digits.
    - An option (`B`, `(B)`, `\textbf{(B)}\ 12`): its letter, or what it says. Two letters are wrong.
    - Words (`\text{even}`, `Monday`): the same words, in any case and font. Several words must be in `\text{…}`.
    - Anything else (`2\sqrt{3}`, `x^2+1`, `[0,5]`): math-verify must accept every side of an equality. An integral, sum
      or product over an index, limit or derivative is wrong unless the row's answer has one; so are words other than
      a unit, and a run of over 400 digits. `0 \le x < 5` is `[0,5)`, `x \le 2 \text{ or } x \ge 3` is
      `(-\infty,2]\cup[3,\infty)`, `\mathrm{e}` is `e`. Of an answer with dots, only the same text is right.

    A final period is ignored. An answer that math-verify can't parse is wrong; one that it can't finish is invalid,
    never 0: the worker is killed and replaced, and no other completion is affected. Brackets nested over 30 deep,
    powers with an exponent over 9,999 and factorials or binomials of such size are not evaluated; they are invalid too.

    Args:
        cpu_seconds: CPU time for one completion, in seconds, > 0; the runner's wall-clock timeout applies as well.
        max_chars: maximum length of a marked answer; of a text without one, the last `max_chars` characters are read;
            >= 16.
        answer_in_box: the row's answer is the text of a whole solution; the contents of its last `\boxed{…}` count.
    Returns: Score of value 0 or 1, `correct` set.
    Raises: ValueError if the row's answer is missing, is prose or a whole solution, or can't be read as mathematics.
    Source: the math-verify package, 0.9.
    Differs: math-verify, and verl and TRL that call it, evaluate whatever they find in a text, so that repeating the
        question (`54+7`) is an answer, and read words as products of letters; numbers that differ by less than 1e-15
        are equal to them, and they drop dots and everything after a word. verl and TRL call it in their own process,
        where its alarm-based timeout raises in threads, and turn a failure into 0.
    """

    cpu_seconds: float = 1.0
    max_chars: int = 2000
    answer_in_box: bool = False

    kind = "math"
    warm_up = "proxima.reward.workers.graders:warm_math"
    needs_answer = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.cpu_seconds > 0, "cpu_seconds", self.cpu_seconds, "must be > 0 seconds")
        require(self.max_chars >= 16, "max_chars", self.max_chars, "must be >= 16")

    def check(self) -> None:
        require_package("math_verify", "it needs", "proxima-rl[math]")

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        answer = row_answer(required_answer(prompt, self.kind), self.answer_in_box)
        return self._compare(answer, completion.text, _question(prompt))

    def _compare(self, answer: str, text: str, question: str) -> Job | Score:
        reference = _parse_reference(answer)
        if isinstance(reference, Choice):
            return self._compare_choice(reference, answer, text, question)
        if isinstance(reference, str):
            return binary_score(reference in map(normalize_words, self._candidates(text, words=True)))
        if reference is None and "=" in answer:
            reference = asked_number(answer, question)
        if reference is None:
            return self._compare_formula(answer, text)
        candidates = self._candidates(text, number=True)
        if any(_PERIOD.sub("", candidate).strip() == answer.strip() != "" for candidate in candidates[:1]):
            return binary_score(True)
        numbers = (parse_number(candidate, question) for candidate in candidates)
        number = next((number for number in numbers if number is not None), None)
        return binary_score(number is not None and number.finished and same_number(reference, number))

    def _compare_choice(self, choice: Choice, answer: str, text: str, question: str) -> Job | Score:
        """By the letter; a text that names none, by what the option says, or as a formula: `B` may be a variable."""
        marked = self._candidates(text, words=True, choice=True)
        letters = [letter for words in marked if (letter := chosen_letter(words)) is not None]
        if letters or (choice.value is None and not choice.bare):
            return binary_score(choice.letter in letters)
        if choice.value is None:
            return self._compare_formula(answer, text, words=False)
        if is_prose(choice.value):
            return binary_score(normalize_words(choice.value) in map(normalize_words, marked))
        return self._compare(choice.value, text, question)

    def _compare_formula(self, answer: str, text: str, words: bool = True) -> Job | Score:
        candidates = self._candidates(text)[:1]
        marked = dict.fromkeys((*candidates, *(self._candidates(text, words=True) if words else ())))
        if any(same_text(candidate, answer) for candidate in marked):
            return binary_score(True)
        if DOTS.search(answer) or only_text(_normalize_reference(answer)):
            return binary_score(False)
        if is_equation(answer) and not any("=" in candidate for candidate in candidates):
            return binary_score(False)
        return self._by_algebra(answer, candidates[0] if candidates else "")

    def _by_algebra(self, answer: str, formula: str) -> Job:
        formula = _PERIOD.sub("", formula)  # to math-verify, 42. is not 42
        problem = self._unevaluable(answer)
        if problem:
            raise ValueError(f"row's answer not evaluated: {problem}")
        if _DIGITS.search(formula) or unfinished_operation(formula, answer):
            formula = ""  # wrong, provided the row's answer can be parsed
        problem = self._unevaluable(formula)
        if problem:
            raise ValueError(f"answer not evaluated: {problem}")
        formula, answer = as_same_kind(normalize_formula(formula), _normalize_reference(answer))
        answer = _plain_reference(answer)
        sides = [without_words(side, answer) for side in equation_sides(without_range(formula), answer)]
        if None in sides or any(DOTS.search(side or "") for side in sides):
            sides = [""]
        texts = [f"\\boxed{{{side}}}" for side in sides]
        return Job(grader="math", arguments={"answer": answer, "texts": texts}, cpu_seconds=self.cpu_seconds)

    def _candidates(self, text: str, number: bool = False, words: bool = False, choice: bool = False) -> list[str]:
        """The final answer of the text: candidates in the order in which they are tried."""
        boxed = last_boxed(text)
        if boxed is not None:
            return [boxed]
        if "\\boxed{" in text or "\\fbox{" in text:
            return []
        tagged = last_tagged(text, "answer")
        end = text[-self.max_chars :]
        if words:
            return [words_after_marker(end, choice) if tagged is None else tagged]
        unmarked = find_unmarked_answer(end if tagged is None else tagged[-self.max_chars :], number)
        return [text for text in (tagged, unmarked) if text is not None]

    def answer_job(self, answer: Any) -> Job | str | None:
        missing = missing_answer(answer)
        if missing:
            return missing
        try:
            formula = row_answer(answer, self.answer_in_box)
            if _parse_reference(formula) is not None:  # most rows of most data: no worker needed
                return None
        except ValueError as error:
            return str(error)
        if DOTS.search(formula):
            return (
                "has dots for what is not written: only the same text is right; write the answer out, or remove the row"
            )
        problem = self._unevaluable(formula)
        if problem:
            return f"not evaluated: {problem}"
        arguments = {"answer": _normalize_reference(formula)}
        return Job(grader="math_answer", arguments=arguments, cpu_seconds=self.cpu_seconds)

    def _unevaluable(self, formula: str) -> str | None:
        if _DIGITS.search(formula):
            return f"a run of more than {_MAX_DIGITS} digits"
        if len(formula) > self.max_chars:
            return f"more than {self.max_chars} characters"
        return unevaluable(formula)


@lru_cache(maxsize=4096)
def _parse_reference(answer: str) -> WrittenNumber | Choice | str | None:
    """The row's answer as a plain number, an option or words; None if it needs algebra. ValueError if it is prose."""
    # (1,000) is a point
    if re.match(r"\s*(?:\\left)?\(.*,", answer, re.DOTALL):
        number = None
    else:
        number = parse_number(answer)
    if number is not None and not is_sum_of_names(number.name):
        return number
    choice = parse_choice(answer)
    if choice is not None:
        return choice
    if _normalize_reference(answer) in SETS_IN_WORDS:
        return None
    words = parse_words(answer)
    if words is None and is_prose(answer) and not DOTS.search(answer):
        raise ValueError("is prose, not mathematics; write words as \\text{…}, or use 'exact'")
    return words


@lru_cache(maxsize=4096)
def _plain_reference(answer: str) -> str:
    """The row's answer as math-verify should read it: without its unit and fonts, unless a word names its value."""
    if "=" in answer:
        return answer
    return without_words(answer, answer) or answer


@lru_cache(maxsize=4096)
def _normalize_reference(answer: str) -> str:
    return normalize_formula(answer)


def _question(prompt: Prompt) -> str:
    """The text of the last message, in which a formula may be asked for."""
    content = None
    if prompt.messages:
        content = prompt.messages[-1].get("content")
    return content if isinstance(content, str) else ""


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
