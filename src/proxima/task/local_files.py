"""Rows from JSON Lines and Parquet files."""

import glob
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from proxima.data import FieldError, UserError, require
from proxima.system.jsonl import utf8
from proxima.task.column_mapping import ANSWER, ColumnMapping
from proxima.task.protocol import EmptyPromptError, MappedRows, Row, Rows

DEEPEST = 100  # levels of nesting in a row, because the code that writes rows to the run folder recurses


@dataclass(frozen=True, kw_only=True)
class LocalFiles(ColumnMapping):
    """Base of the tasks that read local files.

    Args:
        path: a file, a pattern such as `data/train-*`, or several of either; the files of a pattern are sorted.
    """

    path: str | tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.path), "path", self.path, "must name a file")


@dataclass(frozen=True, kw_only=True)
class Jsonl(LocalFiles):
    """Rows from JSON Lines files: one object per line, whose keys are the columns.

    Opening the data validates every line, so that a broken one is found before training; lines are then read on demand.

    Raises: UserError for a missing file, a broken line (file:line), an absent column, no rows.
    """

    def rows(self, seed: int) -> Rows:
        """Return the lines of all files, in order; the seed is ignored."""
        files = find_files(self.path)
        unusable: list[EmptyPromptError] = []
        lacking: dict[bool, str] = {}
        offsets = _Chained([self._scan(file, unusable, lacking) for file in files])
        require_same_answers(lacking)
        rows = MappedRows(offsets, partial(self._read, files), tuple(unusable), partial(_place, files))
        count = f"{len(files)} empty file{'s' if len(files) > 1 else ''}"
        require(len(rows) > 0, "path", self.path, f"holds no rows ({count})")
        return rows

    def _scan(self, file: Path, unusable: list[EmptyPromptError], lacking: dict[bool, str]) -> "array[int]":
        """Validate every row and return the offset of each. The errors of rows without a prompt are added to
        `unusable`, and the first row with and the first without the answer's column to `lacking`."""
        offsets = array("q")
        for number, offset, line in content_lines(file):
            place = f"{file}:{number}"
            values = _parsed(line, place)
            if not offsets:
                self.require_columns(values, place)
            try:
                self.row(values, place, file.parent)
            except EmptyPromptError as error:
                unusable.append(error)
            lacking.setdefault(self.lacks_answer(values), place)
            offsets.append(offset)
        return offsets

    def columns(self) -> tuple[str, ...] | None:
        """Return the columns of the first row."""
        for file in find_files(self.path):
            for number, _, line in content_lines(file):
                return tuple(_parsed(line, f"{file}:{number}"))
        return None

    def _read(self, files: Sequence[Path], index: int, position: tuple[int, int]) -> Row:
        number, offset = position
        place = f"{files[number]}, byte {offset}"
        with files[number].open("rb") as stream:
            stream.seek(offset)
            return self.row(_parsed(stream.readline(), place), place, files[number].parent)


def _place(files: Sequence[Path], position: tuple[int, int]) -> str:
    """The file:line of a row."""
    number, offset = position
    lines_above = files[number].read_bytes().count(b"\n", 0, offset)
    return f"{files[number]}:{lines_above + 1}"


def content_lines(file: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, offset and content of each line that is not blank."""
    offset = 0
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, offset, line
                offset += len(line)
    except OSError as error:
        error.filename = str(file)  # the error of a failed read has no file name
        raise


def json_object(line: bytes, place: str) -> dict[str, Any]:
    """Parse the columns of a line; UserError if it contains anything else."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        remedy = "repair or remove the line"
        if not line.endswith(b"\n"):
            remedy = f"was the file cut off? {remedy}"
        if b"\r" in line.strip():
            remedy = r"if its lines end in \r alone, rewrite them: tr '\r' '\n' < FILE > NEW"
        raise UserError(f"{place} is not JSON: {error}", remedy=remedy) from None
    if not isinstance(values, dict):
        raise UserError(f"{place} holds a {type(values).__name__}, expected an object with the columns as keys")
    return values


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    """Parse the columns, with lone surrogates as `?`: scraped text contains them, but no tokenizer or file accepts
    them."""
    values = json_object(line, place)
    if line.count(b"[") + line.count(b"{") > DEEPEST:
        _check_depth(values, place)
    surrogates = b"\\u" in line or b"\xed" in line  # escaped, or as the three bytes that UTF-8 forbids
    return json.loads(utf8(json.dumps(values, ensure_ascii=False))) if surrogates else values


def _check_depth(value: Any, place: str) -> None:
    level = [value]
    for _ in range(DEEPEST):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [child for items in inner for child in items]
    if level:
        raise UserError(f"{place} is nested deeper than {DEEPEST} levels", remedy="flatten or remove the line")


@dataclass(frozen=True, kw_only=True)
class Parquet(LocalFiles):
    """Rows from Parquet files.

    Raises: UserError for a missing file, one that is not Parquet, an absent column, no rows.
    """

    def rows(self, seed: int) -> Rows:
        """Return the rows of all files, in order; the seed is ignored. With `metadata`, only the mapped columns are
        kept in memory."""
        from pyarrow import parquet

        tables, lacking = [], dict[bool, str]()
        for file in find_files(self.path):
            present = parquet_columns(file)
            self.require_columns(present, str(file))
            self.refuse_media(present, str(file))
            lacking.setdefault(self.lacks_answer(present), str(file))
            wanted = [name for name in self.fields_by_column() if name != ANSWER or not self.lacks_answer(present)]
            mapped = {name if name in present else name.partition(".")[0] for name in wanted}
            tables.append(parquet.read_table(file, columns=None if self.metadata is None else sorted(mapped)))
        require_same_answers(lacking)
        tables = [table for table in tables if len(table)]
        require(len(tables) > 0, "path", self.path, "holds no rows")
        return MappedRows(_Chained([range(len(table)) for table in tables]), partial(self._row, tables))

    def columns(self) -> tuple[str, ...] | None:
        """Return the columns of the first file."""
        files = find_files(self.path)
        return parquet_columns(files[0]) if files else None

    def _row(self, tables: Sequence[Any], index: int, position: tuple[int, int]) -> Row:
        number, start = position
        return self.row(tables[number].slice(start, 1).to_pylist()[0], f"{self.path}, row {index}")


def parquet_columns(file: Path) -> tuple[str, ...]:
    """Return the columns of a file; UserError if it is not Parquet."""
    import pyarrow
    from pyarrow import parquet

    try:
        return tuple(parquet.read_schema(file).names)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{file} can't be read as Parquet: {' '.join(str(error).split())[:120]}") from None


def require_same_answers(lacking: Mapping[bool, str]) -> None:
    """Raise `UserError` if one place has the answer's column and another lacks it."""
    if len(lacking) == 2:
        what = f"{lacking[True]} has no column {ANSWER!r}, which {lacking[False]} has"
        raise UserError(what, remedy="give every row an answer (null is one), or set answer=null")


class _Chained:
    """Several sequences of integers as one sequence of pairs: the number of the sequence, and its item."""

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self._parts, self._ends = parts, list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[int, int]:
        part = bisect_right(self._ends, index)
        return part, self._parts[part][index - (self._ends[part - 1] if part else 0)]


def find_files(path: str | Sequence[str]) -> list[Path]:
    """Find the files of a path, a pattern or several of either, sorted within each pattern; FieldError if one matches
    no file."""
    files: list[Path] = []
    for pattern in [path] if isinstance(path, str) else path:
        for file in map(Path, sorted(glob.glob(os.path.expanduser(pattern), recursive=True)) or [pattern]):
            if file.is_dir():
                remedy = f"name its files, as in {str(file / '*.jsonl')!r}"
                raise FieldError("path", pattern, "is a folder", remedy=remedy)
            require(file.is_file(), "path", pattern, "names no file", remedy="a pattern looks like 'data/*.jsonl'")
            files.append(file)
    return files
