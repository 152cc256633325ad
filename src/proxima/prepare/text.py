"""A question without its wrapping, the key under which repeats of it meet, and its words."""

import re
import unicodedata
from hashlib import blake2b

# Instructions that published data sets carry around the problem; they are no part of the question. Each is a constant of a file format.
_BEFORE = (
    # DAPO-Math-17k and its AIME-2024; some copies ask for \boxed{$Answer}, some write $ANSWER
    re.compile(
        r"\s*Solve the following math problem step by step\.\s+The last line of your response should be of the form Answer: "
        r".{1,60}? where \$Answer is the answer to the problem\.\s*",
        re.IGNORECASE,
    ),
)
_AFTER = (
    re.compile(r'\s*Remember to put your answer on its own line after "Answer:"[^\n]{0,80}\s*\Z'),
    re.compile(r"\s*Let's think step by step and output the final answer (?:after \"####\"|within \\boxed\{\})\.?\s*\Z"),
    re.compile(r"\s*Please reason step by step, and put your final answer within \\boxed\{\}\.?\s*\Z"),
)
_AFTER_MARKS = ("Remember to put", "Let's think step", "Please reason step")  # a cheap test before the patterns
# A word is a run of letters and digits; a Chinese, Japanese or Korean character is one by itself, as they are written without spaces.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]+")


def bare(text: str) -> str:
    """The question alone: known instructions before and after it stripped, and outer whitespace."""
    for pattern in _BEFORE:
        if match := pattern.match(text):
            text = text[match.end() :]
    if any(mark in text for mark in _AFTER_MARKS):
        for pattern in _AFTER:
            text = pattern.sub("", text)
    return text.strip()


def normalised(text: str) -> str:
    """The bare question in Unicode's NFKC with every run of whitespace as one space: equal texts are the same question.

    Case stays: `A` and `a` may be two quantities. NFKC also writes x² as x2; a clash of two questions by it shows as a conflict of answers.
    """
    return " ".join(unicodedata.normalize("NFKC", bare(text)).split())


def key_of(text: str) -> bytes:
    """16 bytes that stand for the normalised question."""
    return blake2b(normalised(text).encode(), digest_size=16).digest()


def words(text: str) -> list[str]:
    """The words of the bare question in small letters, without punctuation: what overlap is measured in."""
    return _WORD.findall(unicodedata.normalize("NFKC", bare(text)).casefold())


def sound(text: str) -> str:
    """The text with half characters (lone surrogates, as in scraped JSON) as `?`: no tokenizer and no file takes them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
