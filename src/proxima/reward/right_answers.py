"""A row's answer may be a list of right answers; any of them is right, for every reward that compares with it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from proxima.data.flow import Score

AS_LIST = (
    "read it as JSON (task.json_columns=[COLUMN], --json-column of reward score), or write a list of this one text if "
    "it is the answer itself"
)
_LIST_AS_TEXT = re.compile(r"""\s*\[\s*(["']).*\1\s*,?\s*\]\s*""", re.DOTALL)


def right_answers(answer: Any) -> list[Any]:
    """The right answers in a row's answer: the elements of a list, else the answer alone.

    A text is one answer, because `[0, 5]` is an interval. A text that is a list of texts, as in a CSV file, is refused:
    nobody can tell whether the list or one of its elements is right.

    Raises: ValueError, with the reason, for an empty list, a list, object or null in one, an object, and such a text.
    """
    if isinstance(answer, Mapping):
        keys = ", ".join(map(str, answer)) or "none"
        raise ValueError(f"an object, not an answer; map one of its keys, as task.answer=COLUMN.KEY (keys: {keys})")
    if isinstance(answer, str) and _LIST_AS_TEXT.fullmatch(answer):
        raise ValueError(f"a list in a text; {AS_LIST}")
    if not isinstance(answer, list | tuple):
        return [answer]
    if not answer:
        raise ValueError("an empty list: nothing would be right")
    for number, element in enumerate(answer):
        if element is None or isinstance(element, Mapping | list | tuple):
            kind = "null" if element is None else "an object" if isinstance(element, Mapping) else "a list"
            raise ValueError(f"a list of right answers whose element {number} is {kind}")
    return list(answer)


def first_reason(reasons: Sequence[str | None]) -> str | None:
    """The first reason why one of several answers can't be read, with its number; None without any."""
    found = [(number, why) for number, why in enumerate(reasons) if why is not None]
    if not found or len(reasons) == 1:
        return found[0][1] if found else None
    return "element {}: {}".format(*found[0])


def best_score(scores: Sequence[Score]) -> Score:
    """The score of a completion, from its scores with each of the right answers: the greatest value among those that
    are correct. Without any: the first failed score, because that comparison might have been the right one, else the
    greatest value."""
    correct = [score for score in scores if score.valid and score.correct]
    failed = [score for score in scores if not score.valid]
    return max(correct or failed[:1] or scores, key=lambda score: score.value)
