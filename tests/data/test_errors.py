"""Values that errors name have a text, whatever they are."""

import pickle

import pytest

from proxima.data.errors import FieldError, counted, quoted, safe_repr


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        ("seven", "'seven'"),
        (2**16_609, "<int of 16,610 bits>"),
        ([10**5000], "<list>"),
        (nested(100_000), "<list>"),
    ],
    ids=["int", "text", "large int", "large int in a list", "deep list"],
)
def test_what_has_no_repr_is_described(value, text):
    assert safe_repr(value) == text


def test_a_field_error_crosses_a_process_boundary():
    """Workers send it pickled, which builds it anew from its arguments."""
    error = pickle.loads(pickle.dumps(FieldError("top_p", 2.0, "must be <= 1", remedy="lower it")))
    assert (error.field, error.value, error.bound) == ("top_p", 2.0, "must be <= 1")
    assert str(error) == "top_p=2.0 must be <= 1; lower it"


def test_numbers_and_texts_as_messages_write_them():
    assert [counted(number, "row") for number in (0, 1, 2_048)] == ["0 rows", "1 row", "2,048 rows"]
    assert quoted(r"\d+\.") == r"'\d+\.'" and quoted("it's") == '"it\'s"' and quoted("a\nb") == r"'a\nb'"
    assert quoted("abcdef", 3) == "'abc…'"
