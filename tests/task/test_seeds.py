"""Prompts that the environment writes."""

import pytest

from proxima.data import FieldError
from proxima.task.generated import Seeds


def test_rows_are_numbers():
    rows = Seeds(count=3, environment="guess").rows(1)
    assert [row.metadata for row in rows] == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert all(row.messages == ({"role": "user", "content": ""},) and row.answer is None for row in rows)


def test_what_can_not_be():
    with pytest.raises(FieldError, match=r"^environment=None must be set: the rows have no text"):
        Seeds(count=3)
    with pytest.raises(FieldError, match=r"^count=0 must be >= 1"):
        Seeds(count=0, environment="guess")
