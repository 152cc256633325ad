"""Answers of other processes are read up to a limit, counted in bytes taken from the network."""

import asyncio

import pytest

from proxima.data.bounded_reading import TooLongError, UnreadableError, parse_json, read_body, stream_lines

LIMIT = 1000


class Response:
    """What `httpx.Response` has of it; `taken` counts the bytes that were read."""

    def __init__(self, parts, headers=None):
        self.parts, self.headers, self.taken = parts, headers or {}, 0

    async def aiter_raw(self):
        for part in self.parts:
            self.taken += len(part)
            yield part


def endless(part):
    while True:
        yield part


def body(response, **more):
    return asyncio.run(read_body(response, LIMIT, **more))


def lines(response, line=LIMIT, total=10 * LIMIT):
    async def work():
        return [one async for one in stream_lines(response, line=line, total=total)]

    return asyncio.run(work())


def test_a_body_within_the_limit_is_whole():
    assert body(Response([b"a" * 400, b"b" * 600])) == b"a" * 400 + b"b" * 600
    assert body(Response([])) == b""


def test_a_body_beyond_the_limit_is_not_read_on():
    response = Response(endless(b"x" * 300))
    with pytest.raises(TooLongError, match="more than 1000 bytes"):
        body(response)
    assert response.taken == 1200
    assert body(Response(endless(b"x" * 300)), cut=True) == b"x" * 1000


def test_an_announced_length_beyond_the_limit_is_not_read_at_all():
    response = Response(endless(b"x"), {"Content-Length": "67108864"})
    with pytest.raises(TooLongError, match="67108864 bytes, where at most 1000"):
        body(response)
    assert response.taken == 0


def test_a_compressed_body_is_refused_unread():
    response = Response(endless(b"x"), {"Content-Encoding": "gzip"})
    for read in (body, lines):
        with pytest.raises(UnreadableError, match="compressed by 'gzip'"):
            read(response)
    assert response.taken == 0


def test_lines_are_those_of_any_split():
    text = b"first\r\n\nthird \xe2\x80\xa8 same\nlast"
    for size in range(1, len(text) + 1):
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        assert lines(Response(parts)) == [b"first", b"", b"third \xe2\x80\xa8 same", b"last"]


def test_a_line_that_does_not_end_is_not_read_on():
    response = Response(endless(b"x" * 300))
    with pytest.raises(TooLongError, match="a line of more than 1000 bytes"):
        lines(response)
    assert response.taken == 1200
    with pytest.raises(TooLongError, match="a line of more than 5 bytes"):
        lines(Response([b"123456\n"]), line=5)


def test_a_stream_of_short_lines_has_an_end():
    response = Response(endless(b": still here\n"))
    with pytest.raises(TooLongError, match="a stream of more than 10000 bytes"):
        lines(response)
    assert response.taken <= 10 * LIMIT + 13


@pytest.mark.parametrize(
    ("text", "reason"), [("[" * 100_000, "too deeply"), ("{", "no JSON"), ("9" * 5000, "no JSON"), (b"\xff", "no JSON")]
)
def test_json_that_cannot_be_read_is_a_value_error(text, reason):
    with pytest.raises(UnreadableError, match=reason):
        parse_json(text)
