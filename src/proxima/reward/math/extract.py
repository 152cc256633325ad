r"""Finding an answer in a text, in linear time whatever the text holds: numbers, `####`, `\boxed{…}`."""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

# Commas count only between groups of three; an exponent has at most three digits, so that a value never explodes.
_NUMBER = re.compile(
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_BRACE = re.compile(r"[{}]")
_MINUS = "-\u2212"
_SUBTRACTS_FROM = re.compile(r"[\w.)\]}]")  # a minus right after one of these is a subtraction, not a sign


def last_number(text: str) -> Decimal | None:
    """The last number of a text: `$1,234.50.` is 1234.50, `-$5` is -5, the last of `10-7=3` is 3, of `1/2` it is 2;
    none: None."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return None if last is None else _value(text, last)


def first_number(text: str) -> Decimal | None:
    """The first number of a text, read as in `last_number`."""
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
    """A whole text (or a JSON number) as one exact number, `$`, commas and a final period allowed; None when it is
    something else."""
    if isinstance(value, bool) or value is None:
        return None
    text = str(value).strip().replace("\u2212", "-").removesuffix(".")
    bare = text.lstrip("+-$ ")
    match = _NUMBER.fullmatch(bare)
    if match is None or len(text) - len(bare) > 3:
        return None
    number = Decimal(bare.replace(",", ""))
    return number.copy_negate() if "-" in text[: len(text) - len(bare)] else number


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{…}` (or `\fbox{…}`), without the braces; None when there is none or its braces
    never close."""
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
    """What stands in the last `<tag>…</tag>`; None when there is none."""
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if closing and opening else None


_FRACTION = re.compile(
    r"(?P<sign>-?)(?:\\[dt]?frac\s?\{(?P<over>[0-9]{1,40})\}\s?\{(?P<under>[0-9]{1,40})\}|(?P<plain>[0-9]{1,40})(?:/(?P<by>[0-9]{1,40}))?)"
)


def as_fraction(text: str) -> Fraction | None:
    r"""A whole text that is an integer, `a/b` or `\frac{a}{b}` of plain digits, exactly; None when it is something
    else."""
    match = _FRACTION.fullmatch(text.strip())
    if match is None:
        return None
    over, under = int(match["over"] or match["plain"]), int(match["under"] or match["by"] or 1)
    if under == 0:
        return None
    return Fraction(-over if match["sign"] else over, under)


def same_answer(found: str, answer: Any) -> bool:
    """Equal as numbers where both are numbers, else equal as text without outer space."""
    left, right = as_number(found), as_number(answer)
    if left is not None and right is not None:
        return left == right
    return found.strip() == str(answer).strip()
