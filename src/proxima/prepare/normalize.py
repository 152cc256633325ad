"""A question without its wrapping, the key under which repeats of it meet, and its words."""

import re
import unicodedata
from hashlib import blake2b

# Instructions that published data sets carry around the problem; they are no part of the question. Each is a constant
# of a file format.
_BEFORE = (
    # DAPO-Math-17k and its AIME-2024; some copies ask for \boxed{$Answer}, some write $ANSWER
    re.compile(
        r"\s*Solve the following math problem step by step\.\s+The last line of your response should be of the form "
        r"Answer: "
        r".{1,60}? where \$Answer is the answer to the problem\.\s*",
        re.IGNORECASE,
    ),
)
_AFTER = (
    re.compile(r'\s*Remember to put your answer on its own line after "Answer:"[^\n]{0,80}\s*\Z'),
    re.compile(
        r"\s*Let's think step by step and output the final answer (?:after \"####\"|within \\boxed\{\})\.?\s*\Z"
    ),
    re.compile(r"\s*Please reason step by step, and put your final answer within \\boxed\{\}\.?\s*\Z"),
)
_AFTER_MARKS = ("Remember to put", "Let's think step", "Please reason step")  # a cheap test before the patterns
# A word is a run of letters and digits; a Chinese, Japanese or Korean character is one by itself, as they are written
# without spaces.
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]+"
)

# Characters that nobody sees (Unicode's default ignorables): zero-width spaces and joiners, byte order marks, soft
# hyphens, selectors.
_UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_BEFORE_MARK = re.compile(r" +(?=[?!.,;:](?: |\Z))")  # the space of `2 + 2 ?`
# What `telling` keeps beside words: signs that make another question of the same words, and a factorial's `!`; no
# hyphen between words.
_SIGN = r"(?<![^\W\d_]{2})-|-(?![^\W\d_]{2})|[+*/^=<>|%\u00b0\u00b1\u00d7\u00f7\u2200-\u22ff]|(?<=[\d)])!"
_TELLING = re.compile(f"{_WORD.pattern}|{_SIGN}")


def strip_instructions(text: str) -> str:
    """The question alone: known instructions before and after it stripped, and outer whitespace."""
    for pattern in _BEFORE:
        if match := pattern.match(text):
            text = text[match.end() :]
    if any(mark in text for mark in _AFTER_MARKS):
        for pattern in _AFTER:
            text = pattern.sub("", text)
    return text.strip()


def normalize(text: str) -> str:
    """The bare question as it is seen: equal texts are the same question.

    Unseen characters are gone, the rest is in Unicode's NFKC, every run of whitespace is one space, none before a mark
    (`2+2 ?`).
    Case stays: `A` and `a` may be two quantities. NFKC also writes x² as x2; a clash of two questions by it shows as a
    conflict of answers.
    """
    return _BEFORE_MARK.sub(
        "", " ".join(unicodedata.normalize("NFKC", strip_instructions(_UNSEEN.sub("", sound(text)))).split())
    )


def question_key(text: str) -> bytes:
    """16 bytes that stand for the normalised question."""
    return blake2b(normalize(text).encode(), digest_size=16).digest()


def words(text: str) -> list[str]:
    """The words of the bare question in small letters, without punctuation: what overlap is measured in."""
    return _WORD.findall(_small(text))


def comparison_text(text: str) -> str:
    """The words of the bare question and its signs of arithmetic: equal for questions that differ in case, punctuation
    and `$` alone.

    `Compute $2^{10}$.` and `compute 2^{10}` are one, `2+2?` and `2-2?` two. A question without any is its normalised
    text.
    """
    return " ".join(_TELLING.findall(_small(text).replace("\u2212", "-"))) or normalize(text)


def _small(text: str) -> str:
    return unicodedata.normalize("NFKC", strip_instructions(_UNSEEN.sub("", text))).casefold()


def sound(text: str) -> str:
    """The text with half characters (lone surrogates, as in scraped JSON) as `?`: no tokenizer and no file takes
    them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
