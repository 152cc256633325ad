r"""Inequalities as the set of their solutions: `x \le 2 \text{ or } x \ge 3` is `(-\infty,2]\cup[3,\infty)`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from proxima.reward.math.forms import SolutionInterval, Solutions
from proxima.reward.math.latex import (
    TokenReader,
    font_groups,
    is_command,
    is_letter,
    is_word,
    rewritten,
    rules,
    strip_tokens,
    tokenize,
    with_single_spaces,
)
from proxima.reward.math.notation import is_all_reals

_OPPOSITE = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq", r"\neq": r"\neq"}
_OR = frozenset({"or", r"\lor", r"\vee", r"\cup", "∨"})
_AND = frozenset({"and", r"\land", r"\wedge", r"\cap", "∧", "&"})
_COMMA = frozenset({",", ";"})
_SUCH_THAT = frozenset({r"\mid", r"\vert", "|", ":", r"\colon"})
_NO_UNKNOWN = frozenset({r"\infty", r"\pi"})
_IN_ASCII = rules({("<", "="): (r"\leq",), (">", "="): (r"\geq",)})
_INFINITY, _MINUS_INFINITY = [r"\infty"], ["-", r"\infty"]


def as_same_kind(answer: str, reference: str) -> tuple[str, str]:
    r"""Both as intervals where one is an inequality and the other an inequality of the same letter, or an interval;
    else unchanged.

    A comma between inequalities stands for `or` if the reference is a union, else for `and`. Inequalities that `and`
    connects are the interval between them, whatever its ends; a letter in the ends, or several letters with conditions,
    leave both unchanged, and so does a system that needs to be solved.
    """
    if not (is_inequality(answer) or is_inequality(reference)):
        return answer, reference
    union = not _OR.isdisjoint(_with_bare_connectors(tokenize(reference)))
    of_reference = _values(reference, union, "")
    of_answer = _values(answer, union, "" if of_reference and of_reference[0] else reference)
    if of_answer is None or of_reference is None:
        return answer, reference
    unknowns = {unknown for unknown, _ in (of_answer, of_reference) if unknown}
    if len(unknowns) > 1:
        return answer, reference
    return of_answer[1], of_reference[1]


def is_inequality(text: str) -> bool:
    """Return True for a text with one of `<`, `>`, `\\leq`, `\\geq` and `\\neq`."""
    return _has_relation(tokenize(text))


def _has_relation(tokens: Sequence[str]) -> bool:
    return not _OPPOSITE.keys().isdisjoint(tokens)


def _values(text: str, comma_is_or: bool, known: str) -> tuple[str, str] | None:
    r"""The unknown and its values, of inequalities, of `x \in [2,5]` or, without an unknown, of a set; else None."""
    tokens = tokenize(text)
    if _has_relation(tokens):
        solutions = solve(text, comma_is_or, known)
        return None if solutions is None else (solutions.unknown, solutions.latex)
    reader = TokenReader(tokens)
    reader.skip_spaces()
    name = reader.next
    reader.position += 1
    if (is_letter(name) or is_command(name)) and reader.take(r"\in"):
        reader.skip_spaces()
        tokens = tokens[reader.position :]
    else:
        name = ""
    return (name, "".join(tokens)) if _is_set(tokens) else None


def _is_set(tokens: Sequence[str]) -> bool:
    reader = TokenReader(tokens)
    reader.take(r"\left")
    return bool(reader.take("[", "(", r"\emptyset", r"\mathbb"))


@lru_cache(maxsize=4096)
def solve(text: str, comma_is_or: bool, known: str) -> Solutions | None:
    """The solutions of inequalities of one unknown, which is no letter of `known`; None for anything else."""
    tokens = rewritten(with_single_spaces(_with_bare_connectors(tokenize(text))), _IN_ASCII)
    tokens = _without_builder(strip_tokens(tokens, ("$", ".", " ")))
    alternatives = _split(tokens, _OR)
    if len(alternatives) == 1 and comma_is_or and _AND.isdisjoint(tokens) and r"\neq" not in tokens:
        alternatives = _split(tokens, _COMMA)
    known_tokens = tokenize(known)
    sets = [_intersection(part, known_tokens) for part in alternatives]
    found = [solutions for solutions in sets if solutions is not None]
    if len(found) < len(sets) or len({solutions.unknown for solutions in found}) != 1:
        return None
    if len(found) > 1 and any(solutions.excluded for solutions in found):
        return None
    intervals = tuple(interval for solutions in found for interval in solutions.intervals)
    return Solutions(found[0].unknown, intervals, found[0].excluded)


def _with_bare_connectors(tokens: Sequence[str]) -> list[str]:
    r"""The tokens with `or` for `\text{ or }`, `and` for `\text{, and }` and `,` for `\text{,}`."""
    bare: list[str] = []
    end = 0
    for group in font_groups(tokens):
        text = "".join(with_single_spaces(tokenize(group.text)))
        word = text.strip(" ,;")
        if word in ("or", "and") or text in _COMMA:
            bare += [*tokens[end : group.command], " ", word or ",", " "]
            end = group.closing + 1
    return [*bare, *tokens[end:]]


def _without_builder(tokens: list[str]) -> list[str]:
    r"""The condition of `\{x \in \mathbb{R} \mid 2 \le x\}`; all tokens of anything else."""
    if tokens[:1] != [r"\{"] or tokens[-1:] != [r"\}"]:
        return tokens
    inside = tokens[1:-1]
    signs = [i for i, token in enumerate(inside) if token in _SUCH_THAT]
    if not signs:
        return tokens
    name = strip_tokens(inside[: signs[0]], (" ",))
    if r"\in" in name:
        at = name.index(r"\in")
        if not is_all_reals(name[at + 1 :]):
            return tokens
        name = name[:at]
    if not name or not _COMMA.isdisjoint(name):
        return tokens
    return inside[signs[0] + 1 :]


def _split(tokens: Sequence[str], separators: frozenset[str]) -> list[list[str]]:
    """The tokens between separators, without the commas before these."""
    parts = []
    start = 0
    around = (" ", ",", ";") if separators is not _COMMA else (" ",)
    for i, token in enumerate(tokens):
        if token in separators:
            parts.append(strip_tokens(tokens[start:i], (" ",), around))
            start = i + 1
    return [*parts, strip_tokens(tokens[start:], (" ",))]


@dataclass(frozen=True)
class _Condition:
    """That an unknown is in an interval, or is not a value."""

    unknown: str
    interval: SolutionInterval
    excluded: str | None = None


def _intersection(tokens: Sequence[str], known: Sequence[str]) -> Solutions | None:
    """What fulfils all conditions between `and` and commas; None if one can't be read, or two bound the same side."""
    parts: list[list[str]] = []
    for of_and in _split(tokens, _AND):
        parts += _split(of_and, _COMMA)
    conditions: list[_Condition] = []
    for part in parts:
        if part and conditions and conditions[-1].excluded is not None and not _has_relation(part):
            conditions.append(_Condition(conditions[-1].unknown, SolutionInterval(), "".join(part)))  # x \neq 1, 2
            continue
        condition = _condition(part, known)
        if condition is None:
            return None
        conditions.append(condition)
    unknown = conditions[0].unknown
    lows = [condition.interval for condition in conditions if condition.interval.low]
    highs = [condition.interval for condition in conditions if condition.interval.high]
    if len(lows) > 1 or len(highs) > 1 or any(condition.unknown != unknown for condition in conditions):
        return None
    low = lows[0] if lows else SolutionInterval()
    high = highs[0] if highs else SolutionInterval()
    interval = SolutionInterval(low.low, high.high, (low.closed[0], high.closed[1]))
    excluded = tuple(condition.excluded for condition in conditions if condition.excluded is not None)
    return Solutions(unknown, (interval,), excluded)


def _condition(tokens: Sequence[str], known: Sequence[str]) -> _Condition | None:
    sides = _split(tokens, frozenset(_OPPOSITE))
    signs = [token for token in tokens if token in _OPPOSITE]
    if not all(sides):
        return None
    if len(signs) == 1:
        return _with_one_end(sides[0], signs[0], sides[1], known)
    if len(signs) == 2:
        return _with_two_ends(sides, signs, known)
    return None


def _with_one_end(name: list[str], sign: str, end: list[str], known: Sequence[str]) -> _Condition | None:
    if not _is_unknown(name, known):
        name, sign, end = end, _OPPOSITE[sign], name
    if not _is_unknown(name, known) or _contains(end, name):
        return None
    if sign == r"\neq":
        return _Condition("".join(name), SolutionInterval(), "".join(end))
    closed = sign.endswith("eq")
    if _rises(sign):
        return _between(name, _MINUS_INFINITY, end, (False, closed))
    return _between(name, end, _INFINITY, (closed, False))


def _with_two_ends(sides: list[list[str]], signs: list[str], known: Sequence[str]) -> _Condition | None:
    first, name, last = sides
    left, right = signs
    if r"\neq" in signs or not _is_unknown(name, known) or _rises(left) != _rises(right):
        return None
    if not _rises(left):
        first, left, right, last = last, right, left, first
    return _between(name, first, last, (left.endswith("eq"), right.endswith("eq")))


def _between(name: list[str], low: list[str], high: list[str], closed: tuple[bool, bool]) -> _Condition | None:
    lower = [token for token in low if token not in ("+", " ")]
    upper = [token for token in high if token not in ("+", " ")]
    if _contains(lower, name) or _contains(upper, name) or lower == _INFINITY or upper == _MINUS_INFINITY:
        return None
    interval = SolutionInterval(
        None if lower == _MINUS_INFINITY else "".join(low), None if upper == _INFINITY else "".join(high), closed
    )
    return _Condition("".join(name), interval)


def _rises(sign: str) -> bool:
    return sign in ("<", r"\leq")


def _is_unknown(name: list[str], known: Sequence[str]) -> bool:
    r"""Return True for a letter (`x`, `\theta`), also in `x_1`, `x'` and `f(x)`, or a name in words (`\text{Area}`)."""
    if _contains(known, name):
        return False
    groups = font_groups(name)
    if len(groups) == 1 and groups[0].command == 0 and groups[0].closing == len(name) - 1:
        return groups[0].text.replace(" ", "").isalpha()
    reader = TokenReader(name)
    first = reader.next
    reader.position += 1
    if not is_letter(first) and (not is_command(first) or first in _NO_UNKNOWN):
        return False
    reader.take_index()
    while reader.take("'"):
        pass
    argument = reader.tokens[reader.position :]
    is_argument = len(argument) == 3 and (argument[0], argument[2]) == ("(", ")") and is_word(argument[1])
    return not argument or is_argument


def _contains(tokens: Sequence[str], name: Sequence[str]) -> bool:
    return any(tokens[i : i + len(name)] == name for i in range(len(tokens) - len(name) + 1))
