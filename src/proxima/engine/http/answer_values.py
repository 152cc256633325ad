"""Readers of single values in server responses: each returns its type or raises ValueError. Neither JSON's `true` nor a
number in quotes counts as a number."""

from typing import Any

from proxima.data.sampling_mask import SamplingMask
from proxima.system.bounded_reading import TooLargeError, UnreadableError, parse_json

SHOWN, NAMED = 200, 1000  # most characters of server text in a message, and of a name that is used
LARGEST_ID = 2**31 - 1
EXPLAINS = ("error", "message", "detail")  # fields of an error response that explain it


def one_line(value: object, width: int = SHOWN) -> str:
    """Convert a server's text to one line that is safe to print to any terminal or file."""
    try:
        text = str(value)[: 20 * width]
    except RecursionError:
        return "something nested too deeply"
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(shown.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def error_message(text: str) -> str:
    """The message in the body of an error response, in one line."""
    try:
        return one_line(_explained(parse_json(text)))
    except (TooLargeError, UnreadableError):
        return "an HTML page" if text.lstrip()[:1] == "<" else one_line(text)


def _explained(answer: Any) -> Any:
    """The explanation of the failure in a response; the response itself if it has none."""
    while isinstance(answer, dict) and (name := next((name for name in EXPLAINS if name in answer), None)):
        answer = answer[name]
    return answer


def missing(key: object, answer: object = None) -> str:
    """The message for an answer that lacks a field."""
    explanation = _explained(answer)
    return f"it lacks {key!r}" + ("" if explanation is None else f": {one_line(explanation, 100)}")


def whole(value: Any, what: str, least: int = 0) -> int:
    """An integer that is at least `least`."""
    if type(value) is not int or not least <= value <= LARGEST_ID:
        raise ValueError(f"{what} is {_short(value)}, no integer from {least} on")
    return value


def number(value: Any, what: str) -> float:
    """A number; NaN and infinities are allowed."""
    if type(value) not in (int, float):
        raise ValueError(f"{what} is {_short(value)}, not a number")
    return float(value)  # OverflowError for an integer too large for a float


def short_text(value: Any, what: str) -> str:
    """A string of at most `NAMED` characters, all printable (no line breaks)."""
    if not isinstance(value, str) or len(value) > NAMED or not value.isprintable():
        raise ValueError(f"{what} is {_short(value)}, not a short text")
    return value


def plain_name(value: Any) -> str | None:
    """The name of a dtype or a quantization, as `bfloat16`; None: the server leaves it to the model."""
    return None if value in (None, "auto") else one_line(value, 40).removeprefix("torch.")


def items(value: Any, what: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise ValueError(f"{what} is {_short(value)}, not a list")
    return value


def id_list(value: Any, what: str) -> list[int]:
    """A list of non-negative integers."""
    ids = items(value, what)
    if set(map(type, ids)) - {int} or (ids and not 0 <= min(ids) <= max(ids) <= LARGEST_ID):
        raise ValueError(f"{what} contains an invalid token id: {_short(ids)}")
    return ids


def mask_of_sets(value: Any) -> SamplingMask:
    """A set of ids for each token."""
    return SamplingMask.of_sets([id_list(ids, "a sampling mask") for ids in items(value, "sampling masks")])


def version_spans(value: Any) -> tuple[tuple[str, int, int], ...]:
    """The (version, start, end) spans that say which weights sampled which tokens."""
    return tuple(
        (short_text(span["version"], "a version"), whole(span["start"], "a start"), whole(span["end"], "an end"))
        for span in items(value, "weight_versions")
    )


def _short(value: object) -> str:
    return one_line([value], 42)[1:-1] if isinstance(value, str) else one_line(value, 40)
