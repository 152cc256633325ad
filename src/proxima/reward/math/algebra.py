"""What math-verify is asked: the formulas in one notation, and which ones it may evaluate."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from proxima.reward.math.equations import equation_sides
from proxima.reward.math.inequalities import as_same_kind
from proxima.reward.math.latex import Reader, has_dots, is_digits, tokenize
from proxima.reward.math.notation import normalize_formula, without_range, without_words

_MAX_DIGITS, _MAX_DEPTH, _MAX_EXPONENT = 400, 30, 9999
_EXPONENT = re.compile(r"(?:\^|\*\*)[\s({]*[-+]?([0-9]+)(?:[\s)}]*(?:\^|\*\*)[\s({]*([0-9]+))?")
_BINOMIAL = re.compile(r"binom\s*(?:\{[^{}]*\}\s*)?\{[^{}]*(?:\^|[0-9]{6})")
_FACTORIAL = re.compile(r"[0-9]{5}[\s})]*!|\^[\s({]*[0-9]+[\s})]*!|![\s})]*![\s})]*!")
_UNFINISHED = {
    r"\int": "integral",
    r"\iint": "integral",
    r"\iiint": "integral",
    "∫": "integral",
    r"\sum": "sum",
    "∑": "sum",
    r"\prod": "product",
    "∏": "product",
    r"\lim": "limit",
}
_DIFFERENTIALS = ("d", r"\partial")


@dataclass(frozen=True)
class Algebra:
    """A question to math-verify: whether each of the texts equals the answer."""

    answer: str
    texts: tuple[str, ...]


def ask_algebra(answer: str, formula: str, max_chars: int) -> Algebra:
    """The question whether a formula equals the row's answer. ValueError if evaluating either is unbounded."""
    problem = why_not_evaluated(answer, max_chars)
    if problem:
        raise ValueError(f"row's answer not evaluated: {problem}")
    if has_long_number(formula) or not _operations(formula) <= _operations(answer):
        formula = ""  # wrong, provided the row's answer can be parsed
    problem = why_not_evaluated(formula, max_chars)
    if problem:
        raise ValueError(f"answer not evaluated: {problem}")
    formula, answer = as_same_kind(normalize_formula(formula), normalize_reference(answer))
    answer = _plain_reference(answer)
    sides = [without_words(side, answer) for side in equation_sides(without_range(formula), answer)]
    readable = [side for side in sides if side is not None and not has_dots(side)]
    if len(readable) < len(sides):
        readable = [""]
    return Algebra(answer, tuple(f"\\boxed{{{side}}}" for side in readable))


@lru_cache(maxsize=4096)
def normalize_reference(answer: str) -> str:
    return normalize_formula(answer)


@lru_cache(maxsize=4096)
def _plain_reference(answer: str) -> str:
    """The row's answer as math-verify should read it: without its unit and fonts, unless a word names its value."""
    if "=" in answer:
        return answer
    return without_words(answer, answer) or answer


def _operations(formula: str) -> set[str]:
    """The operations of a formula that leave something to do: an integral, a sum or product over an index, a limit, a
    derivative."""
    tokens = tokenize(formula)
    operations = {_UNFINISHED[token] for token in tokens if token in _UNFINISHED}
    if any(token == r"\frac" and _is_derivative(Reader(tokens, i + 1)) for i, token in enumerate(tokens)):
        operations.add("derivative")
    return operations


def _is_derivative(reader: Reader) -> bool:
    r"""Return True for `{d}{dx}` and `{\partial}{\partial x}`."""
    if not (reader.take("{") and reader.take(*_DIFFERENTIALS) and reader.take_all("}", "{")):
        return False
    reader.skip_spaces()
    start = reader.position
    while not reader.ended and reader.next != "}":
        reader.position += 1
    below = "".join(reader.tokens[start : reader.position]).replace(" ", "")
    return len(below.removeprefix(r"\partial").removeprefix("d")) == 1 and below.startswith(_DIFFERENTIALS)


def has_long_number(formula: str) -> bool:
    """Return True for a run of more than 400 digits."""
    return any(len(token) > _MAX_DIGITS and is_digits(token) for token in tokenize(formula))


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
        exponent, tower = int(power[1]), int(power[2] or 1)
        if exponent > _MAX_EXPONENT or (exponent > 1 and tower * math.log10(exponent) > math.log10(_MAX_EXPONENT)):
            return f"an exponent of more than {_MAX_EXPONENT}"
    if _FACTORIAL.search(formula) or _BINOMIAL.search(formula):
        return "a factorial or binomial without bounds"
    return None
