r"""Kinds of answers: each converts an answer of the data to a canonical text, or gives the reason why it can't.

A kind accepts more than a reward does: it only finds rows that no reward can score. Answers with equal canonical texts
are the same.
"""

import re
from decimal import Decimal
from typing import Any

from proxima.reward.math.extract import as_number
from proxima.reward.math.marked import last_boxed

_UNBRACED_BOX = re.compile(r"\\boxed\s+([^\s${}]+)|\\boxed([0-9])")
_MAX_DIGITS = 40  # of an integer; more mean a damaged row

Canonical = tuple[str | None, str]  # canonical text, or None with the reason


def integer(raw: Any) -> Canonical:
    r"""`033`, `1,000`, `27.0`, `so \boxed{5}` → `33`, `1000`, `27`, `5`; DAPO-Math-17k, AMC."""
    text = str(raw)
    if "\\boxed" in text:
        canonical, reason = expression(text)
        if canonical is None:
            return None, reason
        text = canonical
    number = as_number(text.strip().strip("$"))
    if number is None:
        return None, "is not a number"
    if number != number.to_integral_value() or number.adjusted() >= _MAX_DIGITS:
        return None, "is not an integer"
    return str(int(number)), ""


def aime(raw: Any) -> Canonical:
    """An integer in 0 … 999, like every answer of the AIME."""
    text, reason = integer(raw)
    if text is None:
        return None, reason
    return (text, "") if 0 <= int(text) <= 999 else (None, "is not in 0 … 999")


def after_hashes(raw: Any) -> Canonical:
    """GSM8K: the number after the last `####`, or a text that is a number. `70,000` is `70000`, `$5.` is `5`."""
    _, marker, tail = str(raw).rpartition("####")
    number = as_number(tail)
    if number is None:
        return None, "has no number after ####" if marker else "has no ####"
    return _number_text(number), ""


def expression(raw: Any) -> Canonical:
    r"""MATH: any text that is not empty, or the contents of its last `\boxed{…}` or `\boxed 2`."""
    text = str(raw).strip()
    if "\\boxed" in text or "\\fbox" in text:
        boxed = last_boxed(text)
        if boxed is None and (boxes := _UNBRACED_BOX.findall(text)):
            boxed = boxes[-1][0] or boxes[-1][1]
        if boxed is None:
            return None, "has a \\boxed that never closes"
        text = boxed.strip()
    if not text:
        return None, "is empty"
    unescaped = text.replace("\\{", "").replace("\\}", "")
    return (text, "") if unescaped.count("{") == unescaped.count("}") else (None, "has braces that don't match")


def _number_text(number: Decimal) -> str:
    """`70000`, `-5`, `0.5`: no exponent, no trailing zeros."""
    if number == number.to_integral_value() and number.adjusted() < _MAX_DIGITS:
        return str(int(number))
    return format(number.normalize(), "f") if abs(number.adjusted()) < _MAX_DIGITS else str(number)


ANSWERS = {"after_hashes": after_hashes, "aime": aime, "expression": expression, "integer": integer}
