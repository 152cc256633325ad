"""Reads data from other processes, up to a limit: HTTP bodies, streamed lines, and their JSON.

Responses are duck-typed over `httpx.Response`: `headers` and `aiter_raw()`. Requests ask for
`Accept-Encoding: identity`; a compressed body is refused, because a small one can hold gigabytes. JSON is counted
before it is parsed: a few megabytes of `[[],[],…` become gigabytes of Python objects, and a few hundred kilobytes of
`[[[[…` exhaust the stack.
"""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from typing import Any

from proxima.data.json_reader import MAX_DEPTH_RECEIVED, brackets, loaded

MAX_CONTAINERS = 200_000  # objects and lists in total
MAX_STRINGS = 1_000_000  # strings and keys in total


class TooLargeError(ValueError):
    """The response has, or announces, more bytes than allowed, or its JSON exceeds a bound."""


class UnreadableError(ValueError):
    """The response is compressed, or not JSON."""


IDENTITY = {"Accept-Encoding": "identity"}  # requests whose responses are read here must send it


async def read_body(response: Any, limit: int, *, cut: bool = False) -> bytes:
    """The body of a streamed response.

    Args:
        limit: the most bytes to accept.
        cut: return the first `limit` bytes of a longer body instead of raising an error.

    Raises:
        TooLargeError: the body is longer, or is announced to be; no more than `limit` bytes and one network read were
            taken.
        UnreadableError: the body is compressed.
    """
    announced = response.headers.get("Content-Length", "")
    if not cut and announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise TooLargeError(f"an answer of {announced[:20]} bytes, where at most {limit} are expected")
    return await read_at_most(_parts(response), limit, cut=cut)


async def read_at_most(parts: AsyncIterable[bytes], limit: int, *, cut: bool = False) -> bytes:
    """The parts of a body, joined.

    Raises:
        TooLargeError: there are more than `limit` bytes, and `cut` is False; the rest is not read.
    """
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > limit:
            if cut:
                break
            raise TooLargeError(f"more than {limit:,} bytes")
    return bytes(body[:limit])


async def stream_lines(response: Any, *, line: int, total: int) -> AsyncGenerator[bytes, None]:
    """The lines of a streamed response, without line endings; the last one may lack its ending.

    Args:
        line, total: the most bytes of one line, and of the whole stream.

    Raises:
        TooLargeError: a line, complete or not, or the stream is longer.
        UnreadableError: the response is compressed.
    """
    rest = bytearray()
    taken = 0
    async for part in _parts(response):
        taken += len(part)
        if taken > total:
            raise TooLargeError(f"a stream of more than {total} bytes")
        searched = len(rest)
        rest += part
        start = 0
        while (end := rest.find(b"\n", max(start, searched))) >= 0:
            if end - start > line:
                raise TooLargeError(f"a line of more than {line} bytes")
            yield bytes(rest[start:end]).removesuffix(b"\r")
            start = end + 1
        del rest[:start]
        if len(rest) > line:
            raise TooLargeError(f"a line of more than {line} bytes")
    if rest:
        yield bytes(rest)


async def _parts(response: Any) -> AsyncIterator[bytes]:
    coding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise UnreadableError(f"an answer compressed by {coding[:40]!r}, which was not asked for")
    async for part in response.aiter_raw():
        yield part


def parse_json(data: bytes | str, *, parse_int: Callable[[str], Any] | None = None) -> Any:
    """`load_json` with bounds on what the text contains, in UTF-8 if bytes; time and memory are linear in its length,
    which the caller bounds.

    Args:
        parse_int: as in `load_json`.

    Raises:
        TooLargeError: it exceeds a bound.
        UnreadableError: it is not JSON or not UTF-8, or it contains a number with thousands of digits.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    if data.replace(rb"\\", b"").replace(rb"\"", b"").count(b'"') > 2 * MAX_STRINGS:
        raise TooLargeError(f"more than {MAX_STRINGS:,} texts and keys")
    pairs = brackets(data)
    if pairs.count(b"[") + pairs.count(b"{") > MAX_CONTAINERS:
        raise TooLargeError(f"more than {MAX_CONTAINERS:,} objects and lists")
    level = 0
    for bracket in pairs[: 2 * MAX_CONTAINERS]:
        if bracket in b"[{":
            level += 1
        else:
            level -= 1
        if level > MAX_DEPTH_RECEIVED:
            raise TooLargeError(f"more than {MAX_DEPTH_RECEIVED} levels of objects and lists")
    try:
        return loaded(data.decode(), data, parse_int)
    except ValueError as error:
        raise UnreadableError(f"not JSON: {error}") from None
