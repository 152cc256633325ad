"""JSON of another process: bounds that hold before anything is parsed."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxima.data.bounded_json import TooLargeError, parse_json, read_at_most

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='"\\[]{},:a\n') | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='"\\[{a', max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def measure(value):
    """Levels, containers and texts of a value."""
    if not isinstance(value, (list, dict)):
        return 0, 0, int(isinstance(value, str))
    inner = [measure(item) for item in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + max((m[0] for m in inner), default=0), 1 + sum(m[1] for m in inner), keys + sum(m[2] for m in inner)


@settings(max_examples=60, deadline=None)
@given(JSON, st.booleans())
def test_the_bounds_are_exact_whatever_the_texts_hold(value, ascii_only):
    data = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if b"\xed" in data:  # half of a surrogate pair is no UTF-8
        return
    levels, containers, strings = measure(value)
    assert parse_json(data, depth=levels, containers=containers, strings=strings) == json.loads(data)
    for bound, size in {"depth": levels, "containers": containers, "strings": strings}.items():
        if size:
            with pytest.raises(TooLargeError):
                parse_json(data, **{bound: size - 1})


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
def test_what_is_not_json_is_a_value_error(data):
    with pytest.raises(ValueError) as caught:
        parse_json(data)
    assert not isinstance(caught.value, TooLargeError)


def test_a_body_is_read_up_to_its_bound_and_no_further():
    read = []

    async def parts():
        for part in (b"ab", b"cd", b"ef"):
            read.append(part)
            yield part

    assert asyncio.run(read_at_most(parts(), 6)) == b"abcdef"
    read.clear()
    with pytest.raises(TooLargeError, match="more than 3 bytes"):
        asyncio.run(read_at_most(parts(), 3))
    assert read == [b"ab", b"cd"]
