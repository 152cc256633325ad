"""Reads untrusted JSON: whatever the text is, the result is a value or a ValueError.

`json.loads` raises RecursionError for deep nesting and returns values that break later code: a few hundred levels
exhaust the stack when they are written again, an integer of 400 digits does not fit a float, and one of 5,000 can't be
converted to text.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 100  # objects and lists inside one another, in a file
# The same in what a model wrote or another process sent. It is stored inside our own objects and lists, and must be
# within `MAX_DEPTH` when that file is read.
MAX_DEPTH_RECEIVED = 64
MAX_DIGITS = 308  # of an integer; the largest float is 1.8e308
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")


class TooDeepError(ValueError):
    """A JSON text is nested deeper than `depth`."""

    def __init__(self, depth: int = MAX_DEPTH) -> None:
        super().__init__(f"more than {depth} levels of objects and lists")


def load_json(
    text: str | bytes, *, depth: int = MAX_DEPTH, parse_int: Callable[[str], Any] | None = None, **hooks: Any
) -> Any:
    """Parse a JSON text, or bytes in any encoding that `json.loads` detects.

    Args:
        depth: the most objects and lists inside one another.
        parse_int: converts the digits of an integer; with it, `MAX_DIGITS` doesn't apply.
        hooks: as in `json.loads`.

    Raises:
        TooDeepError: the text is nested deeper than `depth`.
        ValueError: an integer has more than `MAX_DIGITS` digits, the text is not JSON (`json.JSONDecodeError`), or the
            bytes can't be decoded (`UnicodeDecodeError`). One line.
    """
    if not isinstance(text, str):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    data = text.encode("utf-8", "surrogatepass")
    value = loaded(text, data, parse_int, **hooks)
    check_depth(data, depth)
    return value


def loaded(text: str, data: bytes, parse_int: Callable[[str], Any] | None, **hooks: Any) -> Any:
    """`load_json` without the check of the depth, which the caller makes; `data` is the text in UTF-8."""
    if parse_int is None and b"0" * (MAX_DIGITS + 1) in data.translate(_DIGITS_AS_ZEROS):  # perhaps inside a string
        parse_int = bounded_int
    try:
        return json.loads(text, parse_int=parse_int, **hooks)
    except RecursionError:
        raise TooDeepError from None


def check_depth(data: bytes, depth: int) -> None:
    """Raise TooDeepError if valid JSON, in UTF-8, is nested deeper than `depth`."""
    if data.count(b"[") + data.count(b"{") <= depth:
        return
    pairs = brackets(data).translate(bytes.maketrans(b"{}", b"[]"))
    for _ in range(depth):  # each pass removes the innermost level
        pairs = pairs.replace(b"[]", b"")
    if pairs:
        raise TooDeepError(depth)


def brackets(data: bytes) -> bytes:
    """The brackets and braces of a JSON text outside its strings."""
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")  # the remaining quotes begin and end strings
    return b"".join(plain.split(b'"')[::2]).translate(None, _NOT_BRACKETS)


def bounded_int(digits: str) -> int:
    """Convert the digits of an integer; ValueError if there are more than `MAX_DIGITS`."""
    count = len(digits.removeprefix("-"))
    if count > MAX_DIGITS:
        raise ValueError(f"an integer of {count:,} digits, at most {MAX_DIGITS} can be read")
    return int(digits)


def json_type(value: Any) -> str:
    """The type of a value as JSON calls it, with its article: `a number`, and not Python's `int`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, Mapping):
        return "an object"
    names = {str: "a string", int: "a number", float: "a number", list: "a list", tuple: "a list"}
    return names.get(type(value), f"a value of type {type(value).__name__}")
