"""Files as a stream of rows: Parquet, JSON Lines, JSON and Arrow, a batch in memory at a time; their bytes are hashed
on the way in."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.prepare.row_formats import RowReader, SourceQuestion, reader_for

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".arrow")
_BATCH = 2048  # rows in memory
_CHUNK = 1 << 20


@dataclass(frozen=True)
class InputFile:
    """A file that is read.

    Args:
        path: where it is.
        name: what the card calls it: its path inside the folder or data set, so that a card does not depend on the
            machine.
        size: bytes.
        sha256: of its bytes, hex.
        rows: as the file says or its lines count; None: not known before it is read.
    """

    path: Path
    name: str
    size: int
    sha256: str
    rows: int | None


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row and where it stood; `raw` is None where the row has not the form of its file's reader, with the reason."""

    raw: SourceQuestion | None
    file: int
    row: int
    reason: str = ""


def inspect_file(path: Path, name: str) -> InputFile:
    """Hash a file and count its rows.

    Raises:
        ValueError: it can't be read; names the file.
    """
    digest, lines, size, last = hashlib.sha256(), 0, 0, b"\n"
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                lines += chunk.count(b"\n")
                size += len(chunk)
                last = chunk[-1:]
    except OSError as problem:
        raise UserError(f"{path} can't be read: {problem.strerror}") from None
    rows: int | None = lines + (last != b"\n") if path.suffix in (".jsonl", ".ndjson") else None
    if path.suffix == ".parquet":
        rows = _parquet(path).metadata.num_rows
    return InputFile(path, name, size, digest.hexdigest(), rows)


def iter_source_rows(inputs: tuple[InputFile, ...]) -> Iterator[SourceRow]:
    """The rows of all files, in order.

    Raises:
        ValueError: a file that is damaged, or whose columns no reader takes.
    """
    for index, one in enumerate(inputs):
        for row, values, reader in _values(one.path):
            try:
                yield SourceRow(reader.read(values), index, row)
            except (KeyError, TypeError, ValueError, AttributeError) as problem:
                what = (
                    f"has no {problem.args[0]!r}" if isinstance(problem, KeyError) else f"has another form: {problem}"
                )
                yield SourceRow(None, index, row, what)


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


def _parquet(path: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path, pre_buffer=False)  # else the whole file is held in memory
    except (OSError, pyarrow.ArrowException) as problem:
        raise UserError(
            f"{path} can't be read as Parquet: {' '.join(str(problem).split())[:120]}; was the download cut off?"
        ) from None


def _parquet_values(path: Path) -> Iterator[tuple[int, Any, RowReader]]:
    import pyarrow

    file = _parquet(path)
    present = file.schema_arrow.names
    reader = reader_for(present, str(path))
    wanted = [name for name in present if name in reader.columns]
    row = 0
    try:
        for batch in file.iter_batches(batch_size=_BATCH, columns=wanted, use_threads=False):
            for values in batch.to_pylist():
                yield row, values, reader
                row += 1
    except (OSError, pyarrow.ArrowException) as problem:
        raise UserError(
            f"{path}, after row {row}: {' '.join(str(problem).split())[:120]}; was the download cut off?"
        ) from None


def _arrow_values(path: Path) -> Iterator[tuple[int, Any, RowReader]]:
    """A file of the `datasets` library: an Arrow stream."""
    import pyarrow

    row = 0
    try:
        with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as batches:
            reader = reader_for(batches.schema.names, str(path))
            for batch in batches:
                wanted = batch.select([name for name in batch.schema.names if name in reader.columns])
                for start in range(0, wanted.num_rows, _BATCH):
                    for values in wanted.slice(start, _BATCH).to_pylist():
                        yield row, values, reader
                        row += 1
    except (OSError, pyarrow.ArrowException) as problem:
        raise UserError(
            f"{path}, after row {row}: {' '.join(str(problem).split())[:120]}; was the copy cut off?"
        ) from None


def _json_values(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON Lines file, of a JSON list, or the one object of a JSON file (MATH as first published has a
    file a problem)."""
    try:
        if path.suffix == ".json" and (whole := _whole(path)) is not None:
            yield from whole
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _as_object(line, f"{path}:{number}")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; give Parquet or JSON Lines") from None


def _whole(path: Path) -> list[dict[str, Any]] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None  # several objects, one a line
    rows = found if isinstance(found, list) else [found]
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(
                f"{path}: entry {index} is a {type(row).__name__}, expected objects with the columns as keys"
            )
    return rows


def _as_object(line: str, place: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{place} is not JSON: {problem}; was the file cut off? repair or remove the line") from None
    if not isinstance(values, dict):
        raise UserError(f"{place} holds a {type(values).__name__}, expected an object with the columns as keys")
    return values
