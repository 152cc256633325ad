"""The reward of recipe.yaml."""

import re
from typing import Any


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
    for right in map(bare_words, answers):
        if right and said[-len(right) :] == right:
            shares.append(len(right) / len(said))
    share = max(shares)
    return {"value": 0.5 + 0.5 * share if share else 0.0, "correct": share > 0}


def bare_words(text: Any) -> list[str]:
    """["new", "york"] for `New York.`"""
    return re.findall(r"\w+", str(text).casefold())
