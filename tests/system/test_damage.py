"""Whatever a damaged file raises is one line that names it, and columns are compared with those that are written."""

import errno

import pyarrow as pa
import pytest

from proxima.data import UserError
from proxima.system.damage import check_columns, reading


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("step"), "run/x can't be read (KeyError: 'step'); do this"),
        (TypeError("a\n  b"), "run/x can't be read (TypeError: a b); do this"),
        (ValueError("no number"), "run/x can't be read (no number); do this"),
        (
            pa.ArrowNotImplementedError("such a type"),
            "run/x can't be read (ArrowNotImplementedError: such a type); do this",
        ),
        (RecursionError(), "run/x can't be read (RecursionError: RecursionError); do this"),
        (OSError(errno.ELOOP, "Too many links", "run/x"), "run/x can't be read (Too many links); do this"),
        (FileNotFoundError("run/x"), "run/x can't be read (run/x); do this"),  # Arrow's
    ],
)
def test_any_error_is_a_line(error, said):
    with pytest.raises(UserError) as caught, reading("run/x", "do this"):
        raise error
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "error", [UserError("told"), FileNotFoundError(errno.ENOENT, "none", "run/x"), ImportError("PIL")]
)
def test_what_says_enough_is_raised_as_it_is(error):
    with pytest.raises(type(error)) as caught, reading("run/x"):
        raise error
    assert caught.value is error


TEXT = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"], pa.binary()).buffers())
FIELDS = {
    "text": pa.field("text", pa.string(), nullable=False),
    "ids": pa.field("ids", pa.list_(pa.int32())),
    "used": pa.field("used", pa.bool_()),
}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"text": [1]}, "the column text is int64, expected string"),
        ({"text": [None]}, "the column text has nulls"),
        ({"text": TEXT}, "UTF8"),
        ({"ids": ["x"]}, "the column ids is string, expected list"),
        ({"ids": [["x"]]}, "the column ids is list"),
        ({"ids": [[0.5]]}, "the column ids is list"),
        ({"used": [1]}, "the column used is int64, expected bool"),
    ],
)
def test_columns_of_other_types_are_refused(columns, said):
    with pytest.raises(ValueError, match=said):
        check_columns(pa.table(columns), FIELDS)


def test_columns_that_are_read_alike_pass():
    wide = pa.table({"text": ["é"], "ids": pa.array([[1]], pa.list_(pa.int64())), "other": [object.__name__]})
    nulls = pa.table({"ids": [None], "used": [None]})
    assert all(check_columns(table, FIELDS) is None for table in (wide, nulls))  # it raises for those refused above
