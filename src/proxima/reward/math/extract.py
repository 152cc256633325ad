"""Finds numbers in a text, in linear time. `marked` finds what stands in a box or a tag."""

import re
from collections import deque
from decimal import Decimal
from typing import Any

# Commas count only between groups of three; an exponent has at most three digits, which bounds the value.
_NUMBER = re.compile(
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_JOINS_ANOTHER = re.compile(
    r"(?:[ $]{0,3}(?:[-+*/^x×÷,;=\u2212\u2013]|(?:and|or|to)\b)[ $(]{0,3}(?:maybe |perhaps |possibly |even |else )?"
    r"|[ ][ $]{0,2})[-\u2212]?\.?[0-9]"
)
_DENIED = re.compile(
    r"(?i:\b(?:not|never|neither|either|between)\b|n['’]t\b|\b(?:less|more) than\b|\bat (?:most|least)\b)"
)
_MINUS = "-\u2212"
_SUBTRACTS_FROM = re.compile(r"[\w.)\]}]")  # a minus after one of these is a subtraction, not a sign


def last_number(text: str) -> Decimal | None:
    """The last number of a text: 1234.50 for `$1,234.50.`, -5 for `-$5`, 3 for `10-7=3`, 2 for `1/2`; None if none."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(text, last[0]) if last else None


def final_number(text: str) -> Decimal | None:
    """The first number of a text; None if another one is joined to it (`61 or 62`, `61/2`, `61, 62`), or if it is
    denied (`not 61`)."""
    match = _NUMBER.search(text)
    if match is None or _JOINS_ANOTHER.match(text, match.end()) or _DENIED.search(text, 0, match.start()):
        return None
    return _value(text, match)


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
