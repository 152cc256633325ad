"""Bodies and JSON of another process, within bounds of size, depth and number of values.

A few megabytes of `[[],[],…` become gigabytes of Python objects, and a few hundred kilobytes of `[[[[…` exhaust the
stack. Both are counted in the bytes, before anything is parsed.
"""

import json
from collections.abc import AsyncIterable, Callable
from typing import Any

MAX_DEPTH = 64  # objects and lists inside one another
MAX_CONTAINERS = 200_000  # objects and lists in all
MAX_STRINGS = 1_000_000
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


class TooLargeError(ValueError):
    """A body or its JSON is over a bound; the message says which."""


async def read_at_most(parts: AsyncIterable[bytes], limit: int) -> bytes:
    """The parts of a body, joined.

    Raises:
        TooLargeError: more than `limit` bytes; the rest is not read.
    """
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > limit:
            raise TooLargeError(f"more than {limit:,} bytes")
    return bytes(body)


def parse_json(
    data: bytes,
    *,
    depth: int = MAX_DEPTH,
    containers: int = MAX_CONTAINERS,
    strings: int = MAX_STRINGS,
    parse_int: Callable[[str], Any] | None = None,
) -> Any:
    """The value of a JSON text in UTF-8; time and memory are linear in its length, which the caller bounds.

    Args:
        depth: most levels of objects and lists.
        containers: most objects and lists in all.
        strings: most texts and keys in all.
        parse_int: as in `json.loads`.

    Raises:
        TooLargeError: it is over a bound.
        ValueError: it is not JSON, or not UTF-8.
    """
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")  # the remaining quotes begin and end strings
    if plain.count(b'"') > 2 * strings:
        raise TooLargeError(f"more than {strings:,} texts and keys")
    brackets = b"".join(plain.split(b'"')[::2]).translate(None, _NOT_BRACKETS)
    if brackets.count(b"[") + brackets.count(b"{") > containers:
        raise TooLargeError(f"more than {containers:,} objects and lists")
    level = 0
    for bracket in brackets[: 2 * containers]:
        level += 1 if bracket in b"[{" else -1
        if level > depth:
            raise TooLargeError(f"more than {depth} levels of objects and lists")
    return json.loads(data.decode(), parse_int=parse_int)
