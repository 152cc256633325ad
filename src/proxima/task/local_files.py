"""Rows from JSONL and Parquet files."""

import glob
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.data import FieldError, UserError, require
from proxima.task.columns import Columns
from proxima.task.protocol import Row, Rows


@dataclass(frozen=True, kw_only=True)
class Jsonl(Columns):
    """Rows from JSON Lines files: one object a line, its keys are the columns.

    Every line is read once when the data is opened, so that a broken one is found before training; afterwards lines are
    read on demand.

    Args:
        path: a file, a pattern such as `data/*.jsonl`, or several of either; files in sorted order within a pattern.
        question: column with the question, or a template over several, as "{question}\\n{hint}".
        messages: column with a whole chat, a list of {role, content}, in place of `question`; none: off.
        answer: column with the answer, or a template; none: the rows have no answer.
        metadata: columns kept for rewards and reports.
    Raises: ValueError for no such file, a broken line (file:line), an absent column, no rows.
    """

    path: str | tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.path), "path", self.path, "must name a file")

    def rows(self, seed: int) -> Rows:
        """The lines of all files, in order; the seed changes nothing."""
        files = find_files(self.path)
        offsets = [self._scan(file) for file in files]
        rows = JsonlRows(self, files, offsets)
        require(
            len(rows) > 0, "path", self.path, f"holds no rows ({len(files)} empty file{'s' if len(files) > 1 else ''})"
        )
        return rows

    def _scan(self, file: Path) -> "array[int]":
        offsets = array("q")
        for number, offset, line in _lines(file):
            place = f"{file}:{number}"
            values = _parsed(line, place)
            if not offsets:
                self.check(values, place)
            self.row(values, place)
            offsets.append(offset)
        return offsets


def _lines(file: Path) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, offset, line
            offset += len(line)


def _parsed(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        values = _without_surrogates(json.loads(line)) if b"\\u" in line else json.loads(line)
    except ValueError as problem:
        raise UserError(f"{place} is not JSON: {problem}; was the file cut off? repair or remove the line") from None
    if not isinstance(values, dict):
        raise UserError(f"{place} holds {type(values).__name__}, expected an object with the columns as keys")
    return values


def _without_surrogates(value: Any) -> Any:
    """Half an emoji, which scraped text often holds as `\\ud83d`, becomes `?`: no tokenizer and no file takes it."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class JsonlRows:
    """Lines of JSONL files by number."""

    columns: Columns
    files: Sequence[Path]
    offsets: "Sequence[array[int]]"

    def __len__(self) -> int:
        return sum(len(offsets) for offsets in self.offsets)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        for file, offsets in zip(self.files, self.offsets, strict=True):
            if index < len(offsets):
                with file.open("rb") as stream:
                    stream.seek(offsets[index])
                    place = f"{file}, byte {offsets[index]}"
                    return self.columns.row(_parsed(stream.readline(), place), place)
            index -= len(offsets)
        raise IndexError(index)


@dataclass(frozen=True, kw_only=True)
class Parquet(Columns):
    """Rows from Parquet files.

    Args:
        path: a file, a pattern such as `data/*.parquet`, or several of either; files in sorted order within a pattern.
        question: column with the question, or a template over several, as "{question}\\n{hint}".
        messages: column with a whole chat, a list of {role, content}, in place of `question`; none: off.
        answer: column with the answer, or a template; none: the rows have no answer.
        metadata: columns kept for rewards and reports.
    Raises: ValueError for no such file, one that is no Parquet, an absent column, no rows.
    """

    path: str | tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.path), "path", self.path, "must name a file")

    def rows(self, seed: int) -> Rows:
        """The rows of all files, in order; the seed changes nothing. Only the mapped columns are held in memory."""
        import pyarrow
        from pyarrow import parquet

        tables = []
        for file in find_files(self.path):
            try:
                present = parquet.read_schema(file).names
            except (OSError, pyarrow.ArrowException) as problem:
                raise UserError(f"{file} can't be read as Parquet: {' '.join(str(problem).split())[:120]}") from None
            self.check(present, str(file))
            heads = sorted({name if name in present else name.partition(".")[0] for name in self.mapped()})
            tables.append(parquet.read_table(file, columns=heads))
        rows = TableRows(self, tables, str(self.path))
        require(len(rows) > 0, "path", self.path, "holds no rows")
        return rows


class TableRows:
    """Rows of Arrow tables by number."""

    def __init__(self, columns: Columns, tables: Sequence[Any], source: str) -> None:
        self._columns, self._tables, self._source = columns, tables, source
        self._ends = [sum(len(table) for table in tables[: i + 1]) for i in range(len(tables))]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect_right(self._ends, index)
        inside = index - (self._ends[which - 1] if which else 0)
        values = self._tables[which].slice(inside, 1).to_pylist()[0]
        return self._columns.row(values, f"{self._source}, row {index}")


def find_files(path: str | Sequence[str]) -> list[Path]:
    """The files that a path, a pattern or several of either name, each pattern's in sorted order.

    Raises:
        ValueError: one of them names no file.
    """
    found: list[Path] = []
    for pattern in [path] if isinstance(path, str) else path:
        names = sorted(glob.glob(pattern, recursive=True)) or [pattern]
        for name in names:
            if not Path(name).is_file():
                if Path(name).is_dir():
                    remedy = f"name its files, as in {str(Path(name) / '*.jsonl')!r}"
                    raise FieldError("path", pattern, "is a folder", remedy=remedy)
                raise FieldError("path", pattern, "names no file", remedy="a pattern looks like 'data/*.jsonl'")
            found.append(Path(name))
    return found
