"""Reads source files as a stream of rows: Parquet, of which one batch is in memory, and what tasks read; and hashes
them."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.prepare.row_formats import SourceQuestion, known_columns, read_row
from proxima.task.file_formats import SUFFIXES, ParquetTable, data_suffix, open_data_file


@dataclass(frozen=True)
class InputFile:
    """A source file.

    Args:
        path: on this machine.
        name: in the card: the path within the folder or data set, which does not depend on the machine.
        size: bytes.
        sha256: of its bytes, hex.
    """

    path: Path
    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row with its file number and row number; `content` is None if the row is malformed, with the reason."""

    content: SourceQuestion | None
    file: int
    row: int
    reason: str = ""


def inspect_file(path: Path, name: str) -> InputFile:
    """Hash a file; UserError, with its path, if it can't be read."""
    try:
        with path.open("rb") as stream:
            return InputFile(path, name, path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None


def iter_source_rows(inputs: Sequence[InputFile]) -> Iterator[SourceRow]:
    """Yield the rows of all files, in order; UserError if a file is damaged, or its columns are of no known form."""
    for index, file in enumerate(inputs):
        for row, values in enumerate(_values(file.path)):
            if row == 0:
                known_columns(values, str(file.path))
            try:
                yield SourceRow(read_row(values), index, row)
            except KeyError as error:
                yield SourceRow(None, index, row, f"has no {error.args[0]!r}")
            except (TypeError, ValueError, AttributeError) as error:
                yield SourceRow(None, index, row, f"has another form: {error}")


def is_data_file(name: str | Path) -> bool:
    """True if the suffix of a file is that of a format that can be read."""
    return data_suffix(Path(name)) in SUFFIXES


def _values(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the columns of each row."""
    table = open_data_file(path)
    if isinstance(table, ParquetTable):
        yield from table.stream(known_columns(table.columns(), str(path)))
    else:
        yield from (values for _, _, values in table.scan())


def combined_sha256(inputs: Sequence[InputFile]) -> str:
    """Return one hash for several files, or the file's own hash for a single one."""
    if len(inputs) == 1:
        return inputs[0].sha256
    return hashlib.sha256("".join(f"{file.sha256} {file.name}\n" for file in inputs).encode()).hexdigest()
