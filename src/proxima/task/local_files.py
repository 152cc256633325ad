"""Rows from local files: Parquet, JSON Lines, JSON and CSV, and the folders of `proxima data prepare`."""

import glob
import os
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, Literal

from proxima.data import FieldError, MissingFileError, UserError, require
from proxima.data.errors import counted
from proxima.task.column_mapping import ANSWER, ColumnMapping
from proxima.task.file_formats import HEADER, CsvTable, DataFile, ParquetTable, Values, open_data_file
from proxima.task.protocol import EmptyPromptError, MappedRows, PlayedTask, Row, Rows, user_message
from proxima.task.template import fill, require_question_template


@dataclass(frozen=True, kw_only=True)
class Files(ColumnMapping):
    """Rows from local files: Parquet, JSON Lines, JSON, CSV or TSV, identified by each file's suffix and content.

    A file without a suffix is read as the kind says, or as JSON Lines; one with another suffix is refused.

    `jsonl`, `json`, `csv` and `tsv` may be gzipped (`train.csv.gz`), and in UTF-16 with a byte order mark, as Excel
    writes it. A `.json` file contains a list of objects, possibly under a key `data`, `rows`, `examples` or
    `instances`, one object, or one per line. A CSV file has a header line, possibly below Excel's `sep=;`; its cells
    are texts, so 07 stays 07, and an empty one is null. `json_columns` reads lists and objects in cells.

    Opening the data validates every row, so that a broken one is found before training; for Parquet, it checks the
    columns, that all pages can be read, and that texts are UTF-8.

    Args:
        path: a file, a pattern such as `data/train-*`, or several of either; the files of a pattern are sorted.
    Raises: UserError for a missing file, an unknown format, a broken row (file:line), a missing column, or no rows.
    """

    path: str | tuple[str, ...]

    otherwise: ClassVar[str] = ".jsonl"  # how a file without a suffix is read

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.path), "path", self.path, "must name a file")

    def all_rows(self, seed: int) -> Rows:
        """Return the rows of all files, in order; the seed is ignored. If `metadata` is set, only the mapped columns of
        Parquet files are kept in memory."""
        tables = [open_data_file(file, self.otherwise) for file in find_files(self.path)]
        unusable: list[EmptyPromptError] = []
        lacking: dict[bool, str] = {}
        positions: list[Sequence[int]] = []
        for table in tables:
            if isinstance(table, ParquetTable):
                positions.append(self._opened(table, lacking))
            else:
                positions.append(self._scan(table, unusable, lacking))
        require_same_answers(lacking)
        rows = MappedRows(_Chained(positions), partial(self._read, tables), tuple(unusable), partial(_place, tables))
        require(len(rows) > 0, "path", self.path, f"holds no rows ({counted(len(tables), 'empty file')})")
        return rows

    def _opened(self, table: ParquetTable, lacking: dict[bool, str]) -> Sequence[int]:
        """Check the columns of a Parquet file and return its rows; `lacking` as in `_scan`."""
        present = table.columns()
        self.require_columns(present, str(table.file))
        self.refuse_media(present, str(table.file))
        wanted = None if self.metadata is None else self.columns_of(present)
        count = table.load(wanted)
        if count:
            lacking.setdefault(self.lacks_answer(present), str(table.file))
        return range(count)

    def _scan(self, table: DataFile, unusable: list[EmptyPromptError], lacking: dict[bool, str]) -> "array[int]":
        """Validate every row and return its position. Errors of rows without a prompt are added to `unusable`; the
        first row with the answer's column, and the first without it, are added to `lacking`."""
        positions = array("q")
        remedy = HEADER if isinstance(table, CsvTable) else ""
        for position, place, values in table.scan():
            if not positions:
                self.require_columns(values, place, remedy)
            try:
                self.row(values, place, table.file.parent)
            except EmptyPromptError as error:
                unusable.append(error)
            lacking.setdefault(self.lacks_answer(values), place)
            positions.append(position)
        return positions

    def columns(self) -> tuple[str, ...] | None:
        """Return the columns of the first row."""
        for file in find_files(self.path):
            columns = open_data_file(file, self.otherwise).columns()
            if columns:
                return columns
        return None

    def first(self) -> Values | None:
        """Return the columns of the first row, with their values; None without a row."""
        for file in find_files(self.path):
            table = open_data_file(file, self.otherwise)
            if isinstance(table, ParquetTable):
                values = next(table.stream(table.columns()), None)
            else:
                values = next((values for _, _, values in table.scan()), None)
            if values is not None:
                return values
        return None

    def _read(self, tables: Sequence[DataFile | ParquetTable], index: int, position: tuple[int, int]) -> Row:
        number, at = position
        table = tables[number]
        folder = Path() if isinstance(table, ParquetTable) else table.file.parent  # of the paths of images
        return self.row(table.read(at), table.place(at), folder, fills_nulls=table.fills_nulls)


@dataclass(frozen=True, kw_only=True)
class Jsonl(Files):
    """Rows from JSON Lines files, one object per line, whose keys are the columns; also reads the formats of `files`.

    Raises: see `files`.
    """


@dataclass(frozen=True, kw_only=True)
class Csv(Files):
    """Rows from CSV files, whose first line has the names of the columns; also reads the formats of `files`.

    Raises: see `files`.
    """

    otherwise = ".csv"


@dataclass(frozen=True, kw_only=True)
class Parquet(Files):
    """Rows from Parquet files; also reads the formats of `files`.

    Raises: see `files`.
    """

    otherwise = ".parquet"


def _place(tables: Sequence[DataFile | ParquetTable], position: tuple[int, int]) -> str:
    """The file of a row, with its line or number."""
    number, at = position
    return tables[number].place(at)


def require_same_answers(lacking: Mapping[bool, str]) -> None:
    """Raise `UserError` if one row or file has the answer's column and another lacks it."""
    if len(lacking) == 2:
        what = f"{lacking[True]} has no column {ANSWER!r}, which {lacking[False]} has"
        raise UserError(what, remedy="give every row an answer (null is one), or set answer=null")


class _Chained:
    """Several sequences of integers as one sequence of pairs: the number of the sequence, and its item."""

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[int, int]:
        part = bisect_right(self._ends, index)
        begin = self._ends[part - 1] if part else 0
        return part, self._parts[part][index - begin]


def find_files(path: str | Sequence[str]) -> list[Path]:
    """Find the files of a path, a pattern, or several of either, sorted within each pattern; FieldError if any matches
    no file."""
    patterns = [path] if isinstance(path, str) else path
    files: list[Path] = []
    for pattern in patterns:
        found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        for file in map(Path, found or [pattern]):
            if file.is_dir():
                remedy = f"name its files, as in {str(file / '*.jsonl')!r}"
                raise FieldError("path", pattern, "is a folder", remedy=remedy)
            remedy = "give a path from the current folder, or a pattern such as 'data/*.jsonl'"
            if not file.is_file():
                raise MissingFileError("path", pattern, "names no file", remedy=remedy)
            files.append(file)
    return files


# folders that the command can create
PREPARED = ("aime24", "aime25", "aime26", "amc23", "dapo-math", "gsm8k", "math", "math500")


def prepare_command(path: str | Path) -> str | None:
    """Return the command that creates a prepared folder, or the folder of a file; None for an unknown name."""
    place = Path(path)
    if place.name in PREPARED:
        return f"proxima data prepare {place.name}"
    if place.suffix and place.parent.name in PREPARED:
        return f"proxima data prepare {place.parent.name}"
    return None


@dataclass(frozen=True, kw_only=True)
class PreparedTask(PlayedTask):
    """A folder created by `proxima data prepare`, with the prompt that its card names.

    Args:
        path: the folder.
        split: `train` or `test`.
        template: a prompt with `{question}` that replaces the card's prompt and system prompt; null: the card's.
        metadata: columns that are passed to rewards and reports, such as `level`, `subject`, `solution`; null: all.
    Returns: rows whose answer is the canonical answer as text.
    Raises: FieldError for a missing folder or split, with the command that creates it.
    """

    path: str
    split: Literal["train", "test"] = "train"
    template: str | None = None
    metadata: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        require(bool(self.path), "path", self.path, "must name a folder")
        require(self.split in ("train", "test"), "split", self.split, "must be 'train' or 'test'")
        if self.template is not None:
            require_question_template(self.template)

    def missing(self) -> str | None:
        """Return the reason why the data can't be read, with the remedy; None if it can."""
        folder = Path(self.path).expanduser()
        command = prepare_command(folder) or "proxima data prepare"
        if folder.is_file():
            return f"no such folder; make it: {command} --from FILE"
        if not folder.is_dir():
            return f"no such folder; make it: {command}"
        if not (folder / f"{self.split}.parquet").is_file():
            other = "test" if self.split == "train" else "train"
            if (folder / f"{other}.parquet").is_file():
                return f"has no {self.split} split, only {other}; set split: {other}, or name another folder"
            return f"holds no {self.split}.parquet; make it: {command}"
        return None

    def rows(self, seed: int) -> Rows:
        """Return the rows in the order of the data; the seed is ignored."""
        missing = self.missing()
        if missing:
            raise MissingFileError("path", self.path, missing)
        file = str(Path(self.path).expanduser() / f"{self.split}.parquet")
        if self.template is None:
            return Parquet(path=file, messages="messages", metadata=self.metadata).rows(seed)
        questions = Parquet(path=file, metadata=self.metadata)
        return MappedRows(questions.rows(seed), self._row)

    def _row(self, index: int, row: Row) -> Row:
        text = fill(self.template or "", {"question": row.messages[-1]["content"]})
        return Row(messages=user_message(text), answer=row.answer, metadata=row.metadata)
