"""Whatever a JSON text is, it becomes a value or a ValueError of one line."""

import json

import pytest

from proxima.data.json_reader import TooDeepError, json_type, load_json


def nested(levels, inside=""):
    return "[" * levels + inside + "]" * levels


@pytest.mark.parametrize("text", [nested(101), nested(500), nested(100_000), "[" * 100_000, '{"a":' * 100_000])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_deep_nesting_is_a_value_error(text, as_bytes):
    with pytest.raises(TooDeepError, match="^more than 100 levels of objects and lists$"):
        load_json(text.encode() if as_bytes else text)


def test_the_caller_may_want_fewer_levels():
    assert load_json(nested(64), depth=64) == json.loads(nested(64))
    with pytest.raises(TooDeepError, match="^more than 64 levels of objects and lists$"):
        load_json(nested(65), depth=64)


def test_only_nesting_is_counted():
    many = "[" + ",".join(["[{}]"] * 5000) + "]"
    assert len(load_json(many)) == 5000
    assert load_json(nested(100)) == json.loads(nested(100))
    in_strings = json.dumps(["[" * 500, '"' + "{" * 500, "\\", "[" * 500])
    assert load_json(in_strings) == json.loads(in_strings)
    assert load_json(f'["é{"[" * 200}"]'.encode("utf-16")) == ["é" + "[" * 200]


@pytest.mark.parametrize("sign", ["", "-"])
def test_an_integer_without_a_float_is_a_value_error(sign):
    assert load_json(f'{{"n": {sign}{"9" * 308}}}') == {"n": int(sign + "9" * 308)}
    for digits in (309, 5000, 1_000_000):
        with pytest.raises(ValueError, match=f"^an integer of {digits:,} digits, at most 308 can be read$"):
            load_json(f'{{"n": [{sign}{"9" * digits}]}}')


def test_digits_elsewhere_are_not_bounded():
    assert load_json(f'["{"1" * 5000}", 0.{"3" * 5000}, 7]') == ["1" * 5000, float("0." + "3" * 20), 7]
    assert load_json("9" * 400, parse_int=len) == 400


@pytest.mark.parametrize("text", ["", "{", "nul", '{"a" 1}', b'"\xff"', b"\xff\xfe\x00"])
def test_other_texts_raise_as_the_standard_library(text):
    with pytest.raises(ValueError):
        load_json(text)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("a", "a string"),
        (1, "a number"),
        (1.5, "a number"),
        (True, "a boolean"),
        (None, "null"),
        ([], "a list"),
        ({}, "an object"),
        (b"", "a value of type bytes"),
    ],
)
def test_a_type_is_named_as_json_names_it(value, name):
    assert json_type(value) == name
