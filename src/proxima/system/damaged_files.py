"""Reads files that proxima wrote and that may have been damaged since: whatever they hold, the error is one line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.data.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

RESTORE = "restore it from a copy"


@contextmanager
def reading(path: Path | str, remedy: str = RESTORE, role: str = "") -> Iterator[None]:
    """Turn every error inside, which reads a file and interprets what it holds, into a UserError that names the file.

    The kinds of errors can't be listed: they are those of the system, of Arrow and SQLite, and of code that gets a text
    for a number or lacks a key. A UserError and a missing file are raised as they are.

    Args:
        role: what it is read as, such as "an evaluation".
    """
    try:
        yield
    except (ImportError, UserError):
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and error.filename is not None:  # Arrow's names no file
            raise
        system = error.strerror if isinstance(error, OSError) else None
        reason = " ".join(str(system or error).split())[:160]
        name = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        read = f"can't be read as {role}" if role else "can't be read"
        raise UserError(f"{path} {read} ({name}{reason or type(error).__name__})", remedy=remedy) from error


def check_columns(table: "pa.Table", fields: Mapping[str, "pa.Field"]) -> None:
    """Raise ValueError if a column is not of the type in which it is written, has nulls that are never written, or its
    content is no such values, such as bytes that are not UTF-8.

    Args:
        fields: the columns as they are written, by name; others may have any type.
    """
    table.validate(full=True)
    for column in table.schema:
        written = fields.get(column.name)
        if written is None:
            continue
        if not _alike(column.type, written.type):
            raise ValueError(f"the column {column.name} is {column.type}, expected {written.type}")
        if not written.nullable and table[column.name].null_count:
            raise ValueError(f"the column {column.name} has nulls")


def _alike(stored: "pa.DataType", written: "pa.DataType") -> bool:
    """True for types whose values are read alike, as the integers and floats of several widths."""
    import pyarrow.types as kinds

    if kinds.is_list(stored) and kinds.is_list(written):
        return _alike(stored.value_type, written.value_type)
    same = (kinds.is_integer, kinds.is_floating, kinds.is_string, kinds.is_boolean, kinds.is_binary)
    return kinds.is_null(stored) or any(is_kind(stored) and is_kind(written) for is_kind in same)
