"""Normal forms of questions and answers.

A question: `task.question_text` normalizes it; here it becomes a key for repeats, and words. An answer: each kind in
`ANSWERS` converts one of the data to a canonical text, or gives the reason why it can't. A kind accepts more than a
reward does: it only finds rows that no reward can score. Answers with equal canonical texts are the same.
"""

import re
import unicodedata
from decimal import Decimal
from hashlib import blake2b
from typing import Any

from proxima.reward.math.marked import as_number, last_boxed
from proxima.task.question_text import INVISIBLE, normalize, strip_instructions

# A word is a run of letters and digits; Chinese, Japanese and Korean have no spaces, so each character is a word.
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]+"
)

# Kept by `comparison_text` in addition to words: arithmetic signs and a factorial's `!`, but no hyphen between words.
_SIGN = r"(?<![^\W\d_]{2})-|-(?![^\W\d_]{2})|[+*/^=<>|%\u00b0\u00b1\u00d7\u00f7\u2200-\u22ff]|(?<=[\d)])!"
_WORD_OR_SIGN = re.compile(f"{_WORD.pattern}|{_SIGN}")


def text_hash(text: str) -> bytes:
    """A 16-byte hash of any text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def question_key(text: str) -> bytes:
    """The hash of the normalized question."""
    return text_hash(normalize(text))


def words(text: str) -> list[str]:
    """Return the words of the question in lower case, without punctuation, as compared for overlap."""
    return _WORD.findall(_casefolded(text))


def comparison_text(text: str) -> str:
    """Return the words and arithmetic signs of the question: equal if only case, punctuation and `$` differ.

    `Compute $2^{10}$.` equals `compute 2^{10}`, and `2+2?` differs from `2-2?`. A question without words or signs is
    only normalized.
    """
    with_minus = _casefolded(text).replace("\u2212", "-")
    words = _WORD_OR_SIGN.findall(with_minus)
    return " ".join(words) or normalize(text)


def _casefolded(text: str) -> str:
    question = strip_instructions(INVISIBLE.sub("", text))
    return unicodedata.normalize("NFKC", question).casefold()


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
    if 0 <= int(text) <= 999:
        return (text, "")
    return (None, "is not in 0 … 999")


def after_hashes(raw: Any) -> Canonical:
    """GSM8K: the number after the last `####`, or a text that is a number. `70,000` is `70000`, `$5.` is `5`."""
    _, marker, tail = str(raw).rpartition("####")
    number = as_number(tail)
    if number is None and marker:
        return None, "has no number after ####"
    if number is None:
        return None, "has no ####"
    return _number_text(number), ""


def expression(raw: Any) -> Canonical:
    r"""MATH: any text that is not empty, or the contents of its last `\boxed{…}` or `\boxed 2`."""
    text = str(raw).strip()
    if "\\boxed" in text or "\\fbox" in text:
        boxed = last_boxed(text)
        unbraced = _UNBRACED_BOX.findall(text)
        if boxed is None and unbraced:
            first, second = unbraced[-1]
            boxed = first or second
        if boxed is None:
            return None, "has a \\boxed that never closes"
        text = boxed.strip()
    if not text:
        return None, "is empty"
    unescaped = text.replace("\\{", "").replace("\\}", "")
    if unescaped.count("{") == unescaped.count("}"):
        return (text, "")
    return (None, "has braces that don't match")


def _number_text(number: Decimal) -> str:
    """`70000`, `-5`, `0.5`: no exponent, no trailing zeros."""
    if number == number.to_integral_value() and number.adjusted() < _MAX_DIGITS:
        return str(int(number))
    if abs(number.adjusted()) < _MAX_DIGITS:
        return format(number.normalize(), "f")
    return str(number)


ANSWERS = {"after_hashes": after_hashes, "aime": aime, "expression": expression, "integer": integer}
