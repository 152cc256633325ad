"""Reads what another process sends, up to a limit: bodies and streamed lines of HTTP responses, and their JSON.

Duck-typed over `httpx.Response`, of which it reads `headers` and `aiter_raw()`. A client that reads by it asks for
`Accept-Encoding: identity`: a body that is compressed all the same is refused, because a small one can hold gigabytes.
"""

import json
from collections.abc import AsyncIterator
from typing import Any


class TooLongError(ValueError):
    """More bytes came, or were announced, than such an answer may have."""


class UnreadableError(ValueError):
    """What came can't be read: it is compressed, no JSON, or nested too deeply."""


IDENTITY = {"Accept-Encoding": "identity"}  # what a request must say whose answer is read here


async def read_body(response: Any, limit: int, *, cut: bool = False) -> bytes:
    """The body of a streamed response.

    Args:
        limit: of its bytes.
        cut: return the first `limit` bytes of a longer one, in place of an error.

    Raises:
        TooLongError: it is longer, or is announced to be; no more than `limit` and one network read were taken.
        UnreadableError: it is compressed.
    """
    announced = response.headers.get("Content-Length", "")
    if not cut and announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise TooLongError(f"an answer of {announced[:20]} bytes, where at most {limit} are expected")
    body = bytearray()
    async for part in _parts(response):
        body += part
        if len(body) > limit:
            if cut:
                break
            raise TooLongError(f"an answer of more than {limit} bytes")
    return bytes(body[:limit])


async def stream_lines(response: Any, *, line: int, total: int) -> AsyncIterator[bytes]:
    """The lines of a streamed response, without their ends; the last one may lack its end.

    Args:
        line, total: most bytes of one line, and of all.

    Raises:
        TooLongError: a line, ended or not, or the whole is longer.
        UnreadableError: it is compressed.
    """
    rest, taken = bytearray(), 0
    async for part in _parts(response):
        taken += len(part)
        if taken > total:
            raise TooLongError(f"a stream of more than {total} bytes")
        searched = len(rest)
        rest += part
        start = 0
        while (end := rest.find(b"\n", max(start, searched))) >= 0:
            if end - start > line:
                raise TooLongError(f"a line of more than {line} bytes")
            yield bytes(rest[start:end]).removesuffix(b"\r")
            start = end + 1
        del rest[:start]
        if len(rest) > line:
            raise TooLongError(f"a line of more than {line} bytes")
    if rest:
        yield bytes(rest)


async def _parts(response: Any) -> AsyncIterator[bytes]:
    coding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise UnreadableError(f"an answer compressed by {coding[:40]!r}, which was not asked for")
    async for part in response.aiter_raw():
        yield part


def parse_json(text: bytes | str) -> Any:
    """Decoded JSON of a stranger.

    Raises:
        UnreadableError: it is no JSON, or nested too deeply, or holds a number of thousands of digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise UnreadableError("JSON nested too deeply") from None
    except ValueError as error:
        raise UnreadableError(f"no JSON: {error}") from None
