r"""Is the given answer an answer? A kind of answer turns what stands in the data into one canonical text, or says why
it can't.

This asks less than a reward does: it finds rows that no reward can ever score. Two answers are the same if their
canonical texts are.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from proxima.reward.math.extract import as_number, last_boxed

_BOXED_BARE = re.compile(r"\\boxed\s+([^\s${}]+)|\\boxed([0-9])")
_LONGEST = 40  # digits of an integer; longer ones are a damaged row

Reading = tuple[str | None, str]  # canonical text, or None with the reason


def integer(raw: Any) -> Reading:
    r"""`033`, `1,000`, `27.0`, `so \boxed{5}` → `33`, `1000`, `27`, `5`; DAPO-Math-17k, AMC."""
    text = str(raw)
    if "\\boxed" in text:
        found, reason = expression(text)
        if found is None:
            return None, reason
        text = found
    number = as_number(text.strip().strip("$"))
    if number is None:
        return None, "is no number"
    if number != number.to_integral_value() or number.adjusted() >= _LONGEST:
        return None, "is no integer"
    return str(int(number)), ""


def aime(raw: Any) -> Reading:
    """An integer in 0 … 999, as every answer of the AIME is."""
    text, reason = integer(raw)
    if text is None:
        return None, reason
    return (text, "") if 0 <= int(text) <= 999 else (None, "is not in 0 … 999")


def after_hashes(raw: Any) -> Reading:
    """The number after the last `####`, or a text that is a number: GSM8K. `70,000` is `70000`, `$5.` is `5`."""
    _, marker, tail = str(raw).rpartition("####")
    number = as_number(tail)
    if number is None:
        return None, "has no number after ####" if marker else "has no ####"
    return _number_text(number), ""


def expression(raw: Any) -> Reading:
    r"""MATH: any text that is not empty, or what the last `\boxed{…}` of it holds; `\boxed 2` counts too."""
    text = str(raw).strip()
    if "\\boxed" in text or "\\fbox" in text:
        found = last_boxed(text)
        if found is None and (bare := _BOXED_BARE.findall(text)):
            found = bare[-1][0] or bare[-1][1]
        if found is None:
            return None, "has a \\boxed that never closes"
        text = found.strip()
    if not text:
        return None, "is empty"
    plain = text.replace("\\{", "").replace("\\}", "")
    return (text, "") if plain.count("{") == plain.count("}") else (None, "has braces that don't match")


def _number_text(number: Decimal) -> str:
    """`70000`, `-5`, `0.5`: no exponent, no trailing zeros."""
    if number == number.to_integral_value() and number.adjusted() < _LONGEST:
        return str(int(number))
    return format(number.normalize(), "f") if abs(number.adjusted()) < _LONGEST else str(number)


ANSWERS: dict[str, Callable[[Any], Reading]] = {
    "after_hashes": after_hashes,
    "aime": aime,
    "expression": expression,
    "integer": integer,
}
