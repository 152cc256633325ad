"""The reward of recipe.yaml."""

import re
import unicodedata
from typing import Any

VARIATION_SELECTORS = "\ufe0e\ufe0f"  # of ❤ as a text or as a picture


def right_words(completion: str, answer: Any) -> dict[str, float | bool]:
    """0 unless the last words of the completion are the row's answer; otherwise 0.5, plus 0.5 times the share of its
    words that are the answer. Case and punctuation are ignored; a list has several right answers.

    Called once per completion, in a worker process: if it raises or hangs, that completion has no score and the run
    continues. Returns a number, or a dict: `value` is trained on, `correct` counts as accuracy, and any other number is
    logged.
    """
    said = bare_words(completion)
    answers = answer if isinstance(answer, list) else [answer]
    shares = [0.0]
    for right in answers:
        words = bare_words(right)
        if words and said[-len(words) :] == words:
            shares.append(len(words) / len(said))
        elif not words and str(right).strip() == completion.strip():  # an answer such as * or %
            shares.append(1.0)
    share = max(shares)
    return {"value": 0.5 + 0.5 * share if share else 0.0, "correct": share > 0}


def bare_words(text: Any) -> list[str]:
    """["new", "york"] for `New York.`, ["c", "+", "+"] for `C++`, ["−", "5"] for `-5`.

    A word is made of letters, digits and their accents and vowel signs. Symbols, such as + or 👍, are words too.
    """
    plain = unicodedata.normalize("NFC", str(text).casefold())
    signed = re.sub(r"(?<!\w)-(?=\.?\d)", "−", plain)  # a minus; a hyphen is punctuation
    sharp = re.sub(r"(?<=\w)#(?!\w)", "♯", signed)  # of C#
    return "".join(map(spaced, sharp)).split()


def spaced(character: str) -> str:
    """The character of a word itself, a symbol between spaces, and a space for anything else."""
    kind = unicodedata.category(character)
    if character in VARIATION_SELECTORS:
        return ""
    if kind[0] in "LMN" or character == "_":
        return character
    return f" {character} " if kind in ("Sm", "So") else " "
