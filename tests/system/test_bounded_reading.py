"""Answers of other processes are read up to a limit, counted in bytes taken from the network."""

import asyncio
import json
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxima.system import bounded_reading
from proxima.system.bounded_reading import TooLargeError, UnreadableError, parse_json

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
    return asyncio.run(bounded_reading.read_body(response, LIMIT, **more))


def lines(response, line=LIMIT, total=10 * LIMIT):
    async def work():
        return [entry async for entry in bounded_reading.stream_lines(response, line=line, total=total)]

    return asyncio.run(work())


def test_a_body_within_the_limit_is_whole():
    assert body(Response([b"a" * 400, b"b" * 600])) == b"a" * 400 + b"b" * 600
    assert body(Response([])) == b""


def test_a_body_beyond_the_limit_is_not_read_on():
    response = Response(endless(b"x" * 300))
    with pytest.raises(TooLargeError, match="more than 1,000 bytes"):
        body(response)
    assert response.taken == 1200
    assert body(Response(endless(b"x" * 300)), cut=True) == b"x" * 1000


def test_an_announced_length_beyond_the_limit_is_not_read_at_all():
    response = Response(endless(b"x"), {"Content-Length": "67108864"})
    with pytest.raises(TooLargeError, match="67108864 bytes, where at most 1000"):
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
    with pytest.raises(TooLargeError, match="a line of more than 1000 bytes"):
        lines(response)
    assert response.taken == 1200
    with pytest.raises(TooLargeError, match="a line of more than 5 bytes"):
        lines(Response([b"123456\n"]), line=5)


def test_a_stream_of_short_lines_has_an_end():
    response = Response(endless(b": still here\n"))
    with pytest.raises(TooLargeError, match="a stream of more than 10000 bytes"):
        lines(response)
    assert response.taken <= 10 * LIMIT + 13


LEAVES = st.none() | st.booleans() | st.integers() | st.text(alphabet='"\\[]{},:a\n') | st.text(max_size=3)
KEYS = st.text(alphabet='"\\[{a', max_size=3)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12
)


def measure(value):
    """Levels, containers and texts of a value."""
    if not isinstance(value, (list, dict)):
        return 0, 0, int(isinstance(value, str))
    inner = [measure(item) for item in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + max((m[0] for m in inner), default=0), 1 + sum(m[1] for m in inner), keys + sum(m[2] for m in inner)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(JSON, st.booleans())
def test_the_bounds_are_exact_whatever_the_texts_hold(value, ascii_only):
    data = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if b"\xed" in data:  # half of a surrogate pair is no UTF-8
        return
    sizes = dict(zip(("MAX_DEPTH_RECEIVED", "MAX_CONTAINERS", "MAX_STRINGS"), measure(value), strict=True))
    with patch.multiple(bounded_reading, **sizes):
        assert parse_json(data) == json.loads(data)
        for bound, size in sizes.items():
            if size:
                with patch.object(bounded_reading, bound, size - 1), pytest.raises(TooLargeError):
                    parse_json(data)


@pytest.mark.parametrize(
    ("data", "bound"),
    [
        (b"[" * 100_000, "more than 64 levels"),
        (b"[" * 100_000 + b"]" * 100_000, "more than 64 levels"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "more than 64 levels"),
        (b"[" + b"[]," * 200_000 + b"[]]", "more than 200,000 objects and lists"),
        (b"[" + b'"",' * 1_000_000 + b'""]', "more than 1,000,000 texts and keys"),
    ],
)
def test_what_is_over_a_bound_is_refused_before_it_is_parsed(data, bound, monkeypatch):
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(TooLargeError, match=bound):
        parse_json(data)


@pytest.mark.parametrize("data", [b"", b"{", b'["a', b'[\\"]', b"\xff", b"[1] 2", "[]".encode("utf-16"), b"9" * 5000])
def test_what_is_not_json_is_unreadable(data):
    with pytest.raises(UnreadableError, match="not JSON"):
        parse_json(data)
