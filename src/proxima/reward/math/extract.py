r"""Extracts an answer from a text in linear time: numbers, `\boxed{…}`, tags."""

import re
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

# Commas count only between groups of three; an exponent has at most three digits, which bounds the value.
_NUMBER = re.compile(
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_BRACE = re.compile(r"[{}]")
_MINUS = "-\u2212"
_SUBTRACTS_FROM = re.compile(r"[\w.)\]}]")  # a minus after one of these is a subtraction, not a sign


def last_number(text: str) -> Decimal | None:
    """The last number of a text: 1234.50 for `$1,234.50.`, -5 for `-$5`, 3 for `10-7=3`, 2 for `1/2`; None if none."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(text, last[0]) if last else None


def first_number(text: str) -> Decimal | None:
    """The first number of a text; see `last_number`."""
    match = _NUMBER.search(text)
    return None if match is None else _value(text, match)


def _value(text: str, match: re.Match[str]) -> Decimal:
    before = match.start() - 1
    if before >= 0 and text[before] == "$":
        before -= 1
    negative = before >= 0 and text[before] in _MINUS and (before == 0 or not _SUBTRACTS_FROM.match(text[before - 1]))
    number = Decimal(match.group().replace(",", ""))
    return number.copy_negate() if negative else number


def as_number(value: Any) -> Decimal | None:
    """The exact value of a whole text (or a JSON number), with `$`, commas and a final period allowed; else None."""
    if isinstance(value, bool) or value is None:
        return None
    text = str(value).strip().replace("\u2212", "-").removesuffix(".")
    digits = text.lstrip("+-$ ")
    prefix = text[: len(text) - len(digits)]
    if _NUMBER.fullmatch(digits) is None or len(prefix) > 3:
        return None
    number = Decimal(digits.replace(",", ""))
    return number.copy_negate() if "-" in prefix else number


def last_boxed(text: str) -> str | None:
    r"""The contents of the last `\boxed{…}` or `\fbox{…}`; None without one, or if its braces never close."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    opening, depth = text.index("{", start), 0
    for brace in _BRACE.finditer(text, opening):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[opening + 1 : brace.start()]
    return None


def last_tagged(text: str, tag: str) -> str | None:
    """The contents of the last `<tag>…</tag>`; None without one."""
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if closing and opening else None


_FRACTION = re.compile(
    r"(?P<sign>-?)(?:\\[dt]?frac\s?\{(?P<over>[0-9]{1,40})\}\s?\{(?P<under>[0-9]{1,40})\}|(?P<integer>[0-9]{1,40})(?:/(?P<divisor>[0-9]{1,40}))?)"
)


def as_fraction(text: str) -> Fraction | None:
    r"""The exact value of a whole text that is an integer, `a/b` or `\frac{a}{b}` of digits; else None."""
    match = _FRACTION.fullmatch(text.strip())
    if match is None:
        return None
    over, under = int(match["over"] or match["integer"]), int(match["under"] or match["divisor"] or 1)
    if under == 0:
        return None
    return Fraction(-over if match["sign"] else over, under)


def same_answer(text: str, answer: Any) -> bool:
    """Compare as numbers if both are numbers, else as text without outer whitespace."""
    left, right = as_number(text), as_number(answer)
    if left is not None and right is not None:
        return left == right
    return text.strip() == str(answer).strip()
