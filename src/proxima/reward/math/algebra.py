"""What math-verify is asked: the formulas in one notation, and which ones it may evaluate."""

import math
import re
from dataclasses import dataclass

from proxima.reward.math.equations import equation_sides
from proxima.reward.math.formula import Formula, plain_formula
from proxima.reward.math.inequalities import as_same_kind, is_inequality
from proxima.reward.math.latex import has_dots
from proxima.reward.math.notation import without_range, without_words

_MAX_DIGITS = 400
_MAX_DEPTH = 30
_MAX_EXPONENT = 9999
_LONG_NUMBER = re.compile(rf"[0-9]{{{_MAX_DIGITS + 1}}}")
_EXPONENT = re.compile(r"(?:\^|\*\*)[\s({]*[-+]?([0-9]+)(?:[\s)}]*(?:\^|\*\*)[\s({]*([0-9]+))?")
_BINOMIAL = re.compile(r"binom\s*(?:\{[^{}]*\}\s*)?\{[^{}]*(?:\^|[0-9]{6})")
_FACTORIAL = re.compile(r"[0-9]{5}[\s})]*!|\^[\s({]*[0-9]+[\s})]*!|![\s})]*![\s})]*!")


@dataclass(frozen=True)
class Algebra:
    """A question to math-verify: whether each of the texts equals the answer."""

    answer: str
    texts: tuple[str, ...]


def ask_algebra(reference: Formula, answer: Formula, max_chars: int) -> Algebra:
    """The question whether a formula equals the row's answer. ValueError if evaluating either is unbounded."""
    problem = why_not_evaluated(reference.latex, max_chars)
    if problem:
        raise ValueError(f"row's answer not evaluated: {problem}")
    if has_long_number(answer.latex) or not answer.operations <= reference.operations:
        answer = Formula("")  # wrong, provided the row's answer can be parsed
    problem = why_not_evaluated(answer.latex, max_chars)
    if problem:
        raise ValueError(f"answer not evaluated: {problem}")
    if is_inequality(answer.normal) or is_inequality(reference.normal):
        formula, expected = as_same_kind(answer.normal, reference.normal)
        expected = plain_formula(expected)
    else:
        formula, expected = answer.normal, reference.plain
    sides = [without_words(side, expected) for side in equation_sides(without_range(formula), expected)]
    readable = [side for side in sides if side is not None and not has_dots(side)]
    if len(readable) < len(sides):
        readable = [""]
    return Algebra(expected, tuple(f"\\boxed{{{side}}}" for side in readable))


def has_long_number(formula: str) -> bool:
    """Return True for a run of more than 400 digits."""
    return _LONG_NUMBER.search(formula) is not None


def why_not_evaluated(formula: str, max_chars: int) -> str | None:
    """The reason why a formula is not given to math-verify, or None."""
    if has_long_number(formula):
        return f"a run of more than {_MAX_DIGITS} digits"
    if len(formula) > max_chars:
        return f"more than {max_chars} characters"
    return unevaluable(formula)


def unevaluable(formula: str) -> str | None:
    """The reason why evaluating a formula may take unbounded time, or None. Runs in linear time; the timeout covers the
    formulas that this misses."""
    depth = deepest = 0
    for character in formula:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    if deepest > _MAX_DEPTH:
        return f"brackets nested {deepest} deep"
    for power in _EXPONENT.finditer(formula):
        exponent = int(power[1])
        tower = int(power[2] or 1)
        if exponent > _MAX_EXPONENT or (exponent > 1 and tower * math.log10(exponent) > math.log10(_MAX_EXPONENT)):
            return f"an exponent of more than {_MAX_EXPONENT}"
    if _FACTORIAL.search(formula) or _BINOMIAL.search(formula):
        return "a factorial or binomial without bounds"
    return None
