"""The reward of recipe.yaml."""

import unicodedata
from collections import Counter
from typing import Any


def shared_words(completion: str, answer: Any) -> float:
    """The words that completion and answer share: the harmonic mean of their shares of both texts, from 0 to 1.

    It only stands in for yours, because whole texts can be right in other words. Called once per completion, in a
    worker process: if it raises or hangs, that completion has no score and the run continues. Returns a number, or a
    dict: `value` is trained on, `correct` counts as accuracy, and any other number is logged.
    """
    said = word_counts(completion)
    expected = word_counts(answer)
    shared = (said & expected).total()
    return 2 * shared / max(1, said.total() + expected.total())


def word_counts(text: Any) -> Counter[str]:
    """How often each word occurs, without case and punctuation; accents and vowel signs belong to their word."""
    plain = unicodedata.normalize("NFC", str(text).casefold())
    return Counter("".join(map(letter_or_space, plain)).split())


def letter_or_space(character: str) -> str:
    """The character of a word itself, and a space for anything else."""
    if unicodedata.category(character)[0] in "LMN" or character == "_":
        return character
    return " "
