"""Normal forms of questions and answers.

A question: without instructions, as a key for repeats, and as words. An answer: each kind in `ANSWERS` converts one of
the data to a canonical text, or gives the reason why it can't. A kind accepts more than a reward does: it only finds
rows that no reward can score. Answers with equal canonical texts are the same.
"""

import re
import unicodedata
from decimal import Decimal
from hashlib import blake2b
from typing import Any

from proxima.reward.math.marked import as_number, last_boxed
from proxima.system.jsonl import utf8

# Instructions that published data sets put around the question, verbatim.
_BEFORE = re.compile(  # DAPO-Math-17k and its AIME-2024; some copies ask for \boxed{$Answer}, some write $ANSWER
    r"\s*Solve the following math problem step by step\.\s+The last line of your response should be of the form "
    r"Answer: .{1,60}? where \$Answer is the answer to the problem\.\s*",
    re.IGNORECASE,
)
_AFTER = (
    re.compile(r'\s*Remember to put your answer on its own line after "Answer:"[^\n]{0,80}\s*\Z'),
    re.compile(
        r"\s*Let's think step by step and output the final answer (?:after \"####\"|within \\boxed\{\})\.?\s*\Z"
    ),
    re.compile(r"\s*Please reason step by step, and put your final answer within \\boxed\{\}\.?\s*\Z"),
)
_AFTER_PREFIXES = ("Remember to put", "Let's think step", "Please reason step")  # tested before the patterns, for speed
# A word is a run of letters and digits; Chinese, Japanese and Korean have no spaces, so each character is a word.
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]+"
)

# Unicode's default ignorables: zero-width spaces and joiners, byte order marks, soft hyphens, variation selectors.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_SPACE_BEFORE_MARK = re.compile(r" +(?=[?!.,;:](?: |\Z))")  # the space of `2 + 2 ?`
# Kept by `comparison_text` in addition to words: arithmetic signs and a factorial's `!`, but no hyphen between words.
_SIGN = r"(?<![^\W\d_]{2})-|-(?![^\W\d_]{2})|[+*/^=<>|%\u00b0\u00b1\u00d7\u00f7\u2200-\u22ff]|(?<=[\d)])!"
_WORD_OR_SIGN = re.compile(f"{_WORD.pattern}|{_SIGN}")


def strip_instructions(text: str) -> str:
    """Remove known instructions before and after the question, and outer whitespace."""
    if match := _BEFORE.match(text):
        text = text[match.end() :]
    if any(prefix in text for prefix in _AFTER_PREFIXES):
        for pattern in _AFTER:
            text = pattern.sub("", text)
    return text.strip()


def normalize(text: str) -> str:
    """Return the question without instructions, as it appears on the page: equal texts are the same question.

    Invisible characters are removed, the rest is converted to Unicode's NFKC, runs of whitespace become one space, and
    spaces before a punctuation mark are removed (`2+2 ?`). Case is kept: `A` and `a` may be two quantities. NFKC also
    turns x² into x2; two questions that clash because of this show up as a conflict of answers.
    """
    visible = strip_instructions(_INVISIBLE.sub("", utf8(text)))
    return _SPACE_BEFORE_MARK.sub("", " ".join(unicodedata.normalize("NFKC", visible).split()))


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
    return " ".join(_WORD_OR_SIGN.findall(_casefolded(text).replace("\u2212", "-"))) or normalize(text)


def _casefolded(text: str) -> str:
    return unicodedata.normalize("NFKC", strip_instructions(_INVISIBLE.sub("", text))).casefold()


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
