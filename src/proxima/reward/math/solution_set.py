r"""Inequalities as intervals: `x \le 2 \text{ or } x \ge 3` is the set `(-\infty,2]\cup[3,\infty)`."""

import re
from dataclasses import dataclass
from functools import lru_cache

_SIGN = re.compile(r"(<=|>=|<|>|\\leq(?![A-Za-z])|\\geq(?![A-Za-z])|\\neq(?![A-Za-z]))")
_OPPOSITE = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq", r"\neq": r"\neq"}
_WORD = r"\\(?:text[a-z]*|mbox|mathrm)\s*\{{[\s,]*{0}[\s,]*\}}|(?<![A-Za-z\\]){0}(?![A-Za-z])"
_OR = re.compile(rf"[\s,;]*(?:{_WORD.format('or')}|\\lor(?![a-z])|\\vee(?![a-z])|\\cup(?![a-z])|∨)\s*")
_AND = re.compile(rf"[\s,;]*(?:{_WORD.format('and')}|\\land(?![a-z])|\\wedge(?![a-z])|\\cap(?![a-z])|∧|&)\s*")
_COMMA = re.compile(r"\s*[,;]\s*|\s*\\text\s*\{\s*[,;]\s*\}\s*")
_SPACING = re.compile(r"\\[,;:! ]|\\q?quad(?![a-z])|~|\\(?:left|right)(?![A-Za-z])\.?|\s+")
_BUILDER = re.compile(
    r"\\\{\s*(?P<name>[^{}|:,]{1,30}?)\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?:\\mid(?![a-z])|\\vert(?![a-z])|\||:|\\colon(?![a-z]))(?P<condition>.*)\\\}"
)
_VARIABLE = re.compile(
    r"(?:[A-Za-z]|\\(?!infty|pi(?![a-z]))[a-z]+)(?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?'*(?:\([A-Za-z]\))?"
    r"|\\text\s*\{\s*[A-Za-z ]+\s*\}"
)
_MEMBER = re.compile(r"\s*(?P<name>[A-Za-z]|\\[a-z]+)\s*\\in(?![a-z])\s*(?P<set>.*)", re.DOTALL)
_SET = re.compile(r"\s*(?:\\left\s*)?[\[(]|\s*\\(?:emptyset|mathbb)")
_INFINITE = re.compile(r"(?P<sign>[-+]?) ?\\infty")


INFINITY, MINUS_INFINITY = r"\infty", r"-\infty"


@dataclass(frozen=True)
class Condition:
    r"""`low < x < high`, `\leq` in place of `<` where `closed`, an end of None for infinity; or `x \neq excluded`."""

    name: str
    low: str | None = None
    high: str | None = None
    closed: tuple[bool, bool] = (False, False)
    excluded: str | None = None

    def interval(self) -> str:
        left = "[" if self.closed[0] and self.low else "("
        right = "]" if self.closed[1] and self.high else ")"
        return f"{left}{self.low or MINUS_INFINITY},{self.high or INFINITY}{right}"


def as_same_kind(answer: str, reference: str) -> tuple[str, str]:
    r"""Both as intervals where one is an inequality and the other an inequality of the same letter, or an interval;
    else unchanged.

    A comma between inequalities stands for `or` if the reference is a union, else for `and`. Inequalities that `and`
    connects are the interval between them, whatever its ends; a letter in the ends, or several letters with conditions,
    leave both unchanged, and so does a system that needs to be solved.
    """
    if not (_SIGN.search(answer) or _SIGN.search(reference)):
        return answer, reference
    union = _OR.search(reference) is not None
    of_reference = _solutions(reference, union, "")
    of_answer = _solutions(answer, union, "" if of_reference and of_reference[0] else reference)
    if of_answer is None or of_reference is None:
        return answer, reference
    same_unknown = not (of_answer[0] and of_reference[0]) or of_answer[0] == of_reference[0]
    return (of_answer[1], of_reference[1]) if same_unknown else (answer, reference)


def _solutions(text: str, comma_is_or: bool, known: str) -> tuple[str, str] | None:
    """Unknown and set of inequalities, of `x \\in [2,5]` or, without an unknown, of a set."""
    if _SIGN.search(text):
        return inequality_set(text, comma_is_or, known)
    if (member := _MEMBER.fullmatch(text)) is not None:
        return (member["name"], member["set"]) if _SET.match(member["set"]) else None
    return ("", text) if _SET.match(text) else None


@lru_cache(maxsize=4096)
def inequality_set(text: str, comma_is_or: bool, known: str) -> tuple[str, str] | None:
    """Name of the unknown, and the set of its values as intervals; None for anything but inequalities of one unknown.
    `known` are formulas whose letters are not the unknown."""
    text = " ".join(_SPACING.sub(" ", text).split()).strip("$. ").replace("<=", r"\leq").replace(">=", r"\geq")
    if (match := _BUILDER.fullmatch(text)) is not None:
        text = match["condition"]
    alternatives = _OR.split(text)
    if len(alternatives) == 1 and comma_is_or and not _AND.search(text) and "\\neq" not in text:
        alternatives = _COMMA.split(text)
    sets = [_intersection(part, known) for part in alternatives]
    names = {found[0] for found in sets if found is not None}
    if None in sets or len(names) != 1:
        return None
    if len(sets) > 1 and any(found is not None and "setminus" in found[1] for found in sets):
        return None
    return names.pop(), r"\cup".join(found[1] for found in sets if found is not None)


def _intersection(text: str, known: str) -> tuple[str, str] | None:
    conditions: list[Condition] = []
    for part in (part for parts in _AND.split(text) for part in _COMMA.split(parts)):
        previous = conditions[-1] if conditions else None
        if previous is not None and previous.excluded is not None and not _SIGN.search(part) and part:
            conditions.append(Condition(previous.name, excluded=part))  # x \neq 1, 2
            continue
        condition = _condition(part, known)
        if condition is None:
            return None
        conditions.append(condition)
    if len({condition.name for condition in conditions}) != 1:
        return None
    lows = [condition for condition in conditions if condition.low]
    highs = [condition for condition in conditions if condition.high]
    if len(lows) > 1 or len(highs) > 1:
        return None
    line = Condition(conditions[0].name)
    low, high = (lows or [line])[0], (highs or [line])[0]
    interval = Condition(line.name, low.low, high.high, (low.closed[0], high.closed[1])).interval()
    excluded = [c.excluded for c in conditions if c.excluded is not None]
    return conditions[0].name, rf"{interval}\setminus\{{{','.join(excluded)}\}}" if excluded else interval


def _condition(text: str, known: str) -> Condition | None:
    parts = [part.strip() for part in _SIGN.split(text)]
    if not all(parts) or len(parts) not in (3, 5):
        return None
    if len(parts) == 5:
        first, left, name, right, last = parts
        if r"\neq" in (left, right) or not _is_unknown(name, known) or _rises(left) != _rises(right):
            return None
        if not _rises(left):
            first, left, right, last = last, right, left, first
        return _between(name, first, last, (left.endswith("eq"), right.endswith("eq")))
    name, sign, end = parts
    if not _is_unknown(name, known):
        name, sign, end = end, _OPPOSITE[sign], name
    if not _is_unknown(name, known) or _contains(end, name):
        return None
    if sign == r"\neq":
        return Condition(name, excluded=end)
    closed = sign.endswith("eq")
    if _rises(sign):
        return _between(name, MINUS_INFINITY, end, (False, closed))
    return _between(name, end, INFINITY, (closed, False))


def _between(name: str, low: str, high: str, closed: tuple[bool, bool]) -> Condition | None:
    ends = [_INFINITE.fullmatch(end) for end in (low, high)]
    if (
        _contains(low + " " + high, name)
        or (ends[0] and ends[0]["sign"] != "-")
        or (ends[1] and ends[1]["sign"] == "-")
    ):
        return None
    return Condition(name, None if ends[0] else low, None if ends[1] else high, closed)


def _rises(sign: str) -> bool:
    return sign in ("<", r"\leq")


def _is_unknown(name: str, known: str) -> bool:
    return _VARIABLE.fullmatch(name) is not None and not _contains(known, name)


def _contains(formula: str, name: str) -> bool:
    return re.search(rf"(?<![A-Za-z\\]){re.escape(name)}(?![A-Za-z])", formula) is not None
