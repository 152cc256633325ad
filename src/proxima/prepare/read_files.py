"""Reads source files as a stream of rows, one batch in memory: Parquet, JSON Lines, JSON and Arrow; and hashes them."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.data.text_files import read_text
from proxima.prepare.row_formats import RowReader, SourceQuestion, reader_for
from proxima.task.local_files import json_object

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".arrow")
_BATCH = 2048  # rows
_CHUNK = 1 << 20


@dataclass(frozen=True)
class InputFile:
    """A source file.

    Args:
        path: on this machine.
        name: in the card: the path within the folder or data set, which does not depend on the machine.
        size: bytes.
        sha256: of its bytes, hex.
        rows: number of rows; None: unknown before the file is read.
    """

    path: Path
    name: str
    size: int
    sha256: str
    rows: int | None


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row with its file number and row number; `content` is None if the row is malformed, with the reason."""

    content: SourceQuestion | None
    file: int
    row: int
    reason: str = ""


def inspect_file(path: Path, name: str) -> InputFile:
    """Hash a file and count its rows; UserError, with its path, if it can't be read."""
    digest, lines, size, last = hashlib.sha256(), 0, 0, b"\n"
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                lines += chunk.count(b"\n")
                size += len(chunk)
                last = chunk[-1:]
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    rows: int | None = lines + (last != b"\n") if path.suffix in (".jsonl", ".ndjson") else None
    if path.suffix == ".parquet":
        rows = _parquet(path).metadata.num_rows
    return InputFile(path, name, size, digest.hexdigest(), rows)


def iter_source_rows(inputs: tuple[InputFile, ...]) -> Iterator[SourceRow]:
    """Yield the rows of all files, in order; UserError if a file is damaged, or no reader fits its columns."""
    for index, file in enumerate(inputs):
        for row, values, reader in _values(file.path):
            try:
                yield SourceRow(reader.read(values), index, row)
            except KeyError as error:
                yield SourceRow(None, index, row, f"has no {error.args[0]!r}")
            except (TypeError, ValueError, AttributeError) as error:
                yield SourceRow(None, index, row, f"has another form: {error}")


def _values(path: Path) -> Iterator[tuple[int, Any, RowReader]]:
    if path.suffix == ".parquet":
        yield from _parquet_values(path)
    elif path.suffix == ".arrow":
        yield from _arrow_values(path)
    else:
        reader: RowReader | None = None
        for row, values in enumerate(_json_values(path)):
            reader = reader or reader_for(values, str(path))
            yield row, values, reader


@contextmanager
def _damage_reported(what: str, hint: str) -> Iterator[None]:
    """Turn errors of pyarrow into `UserError`."""
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{what}: {' '.join(str(error).split())[:120]}; {hint}") from None


def _parquet(path: Path) -> Any:
    from pyarrow import parquet

    with _damage_reported(f"{path} can't be read as Parquet", "was the download cut off?"):
        return parquet.ParquetFile(path, pre_buffer=False)  # pre_buffer would hold the whole file in memory


def _parquet_values(path: Path) -> Iterator[tuple[int, Any, RowReader]]:
    file = _parquet(path)
    present = file.schema_arrow.names
    reader = reader_for(present, str(path))
    columns = [name for name in present if name in reader.columns]
    batches, start = file.iter_batches(batch_size=_BATCH, columns=columns, use_threads=False), 0
    while True:
        with _damage_reported(f"{path}, after row {start}", "was the download cut off?"):
            batch = next(batches, None)
            rows = [] if batch is None else batch.to_pylist()
        if batch is None:
            return
        for row, values in enumerate(rows, start):
            yield row, values, reader
        start += len(rows)


def _arrow_values(path: Path) -> Iterator[tuple[int, Any, RowReader]]:
    """Read a file of the `datasets` library: an Arrow stream."""
    import pyarrow

    row = 0
    with (
        _damage_reported(f"{path} can't be read as Arrow", "was the copy cut off?"),
        pyarrow.memory_map(str(path)) as mapped,
        pyarrow.ipc.open_stream(mapped) as batches,
    ):
        reader = reader_for(batches.schema.names, str(path))
        for batch in batches:
            columns = batch.select([name for name in batch.schema.names if name in reader.columns])
            for start in range(0, columns.num_rows, _BATCH):
                for values in columns.slice(start, _BATCH).to_pylist():
                    yield row, values, reader
                    row += 1


def _json_values(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON Lines or a JSON list, or the one object of a JSON file (MATH has one per problem)."""
    try:
        if path.suffix == ".json" and (document := _json_document(path)) is not None:
            yield from document
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield json_object(line, f"{path}:{number}")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; give Parquet or JSON Lines") from None


def _json_document(path: Path) -> list[dict[str, Any]] | None:
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError):
        return None  # one object per line
    entries = document if isinstance(document, list) else [document]
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            expected = "expected objects with the columns as keys"
            raise UserError(f"{path}: entry {index} is a {type(entry).__name__}, {expected}")
    return entries


def combined_sha256(inputs: Sequence[InputFile]) -> str:
    """Return one hash for several files, or the file's own hash for a single one."""
    if len(inputs) == 1:
        return inputs[0].sha256
    return hashlib.sha256("".join(f"{file.sha256} {file.name}\n" for file in inputs).encode()).hexdigest()
