"""The formats of local files. Each reads a file as rows of columns, so that the same column mapping serves all.

`open_data_file` chooses the format by a file's suffix, without `.gz`, and its first bytes; it refuses the suffix of
another format. To add one: a class with the methods of `DataFile`, and a case in `open_data_file`.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

from proxima.data import UserError
from proxima.data.errors import LONGEST_VALUE, abbreviated
from proxima.data.json_reader import MAX_DEPTH, TooDeepError, json_type, load_json
from proxima.system.jsonl import utf8
from proxima.system.user_files import POINTER, POINTER_BOUND, PULL

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
UNPACKED = {".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip", ".zst": "zstd -d"}
SHEET = "save it as CSV"
TABLE = "export a table of it as CSV"
RECORDS = "convert it to Parquet or JSON Lines"
OTHERS = {
    ".arrow": "read the folder that holds it with kind: dataset",
    ".avro": RECORDS,
    ".db": TABLE,
    ".duckdb": TABLE,
    ".feather": RECORDS,
    ".ods": SHEET,
    ".orc": RECORDS,
    ".pickle": RECORDS,
    ".pkl": RECORDS,
    ".sqlite": TABLE,
    ".sqlite3": TABLE,
    ".xls": SHEET,
    ".xlsx": SHEET,
}
# Of a format. `.00001` and `.part-2` number the parts of a file, which has no suffix then.
FORMAT_SUFFIX = re.compile(r"\.[a-z][a-z0-9]*")
GZIP = b"\x1f\x8b"  # the first bytes of such files
PARQUET = b"PAR1"
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
DELIMITERS = (",", ";", "\t", "|")
LISTS = ("data", "rows", "examples", "instances")  # keys under which a JSON document has its rows
# keys beside them; an object with others is a row itself, whose column may be named `examples`
ABOUT = {
    "author",
    "authors",
    "citation",
    "count",
    "created",
    "date",
    "description",
    "features",
    "homepage",
    "info",
    "language",
    "license",
    "meta",
    "metadata",
    "name",
    "size",
    "source",
    "split",
    "title",
    "total",
    "version",
}
MOST_HEADER = 1 << 20  # characters in which the first two lines are looked for
BATCH = 2048  # rows of Parquet that a stream holds
SEPARATOR = re.compile(r"sep=([^\r\n\"])[ \t]*(?:\r\n|\r|\n)", re.IGNORECASE)  # Excel's own first line
# A number, a text with a question mark, or eight words.
DATA_CELL = re.compile(r"[-+$€]?\d[\d.,]*%?|.*\?.*|\S+(?:\s+\S+){7,}", re.DOTALL)
HEADER = "if the first line is data, add one above it that names the columns"
LONGEST_CELL = 2**31 - 1  # characters; the module `csv` allows 131,072 by default

Values = dict[str, Any]


class DataFile(Protocol):
    """The rows of a file. A position is an integer that identifies a row."""

    file: Path
    fills_nulls: ClassVar[bool]  # an object gets the keys of other rows, as null

    def columns(self) -> tuple[str, ...] | None:
        """The columns of the first row; None for an empty file."""
        ...

    def scan(self) -> Iterator[tuple[int, str, Values]]:
        """Yield position, place and values of each row, in order; UserError, with the place, for a broken row."""
        ...

    def read(self, position: int) -> Values:
        """The values of a row."""
        ...

    def place(self, position: int) -> str:
        """The place of a row, for messages: `FILE:LINE` if rows have lines."""
        ...


def data_suffix(file: Path) -> str:
    """The suffix that determines the format of a file: the one before `.gz`, in lower case."""
    return Path(file.name.lower().removesuffix(".gz")).suffix


def open_data_file(file: Path, otherwise: str = ".jsonl") -> "DataFile | ParquetTable":
    """Open a file in its format; a file without a suffix is read as `otherwise`, and Parquet is known by its content.

    Raises:
        UserError: the format is not supported (with a command that converts it), or the file is damaged or a git-lfs
            pointer.
    """
    suffix = data_suffix(file)
    with file.open("rb") as stream:
        start = stream.read(len(POINTER))
    if start == POINTER:
        raise UserError(f"{file} {POINTER_BOUND}", remedy=PULL)
    packed = start.startswith(GZIP)
    if start.startswith(PARQUET):
        return ParquetTable(file)
    _require_known(file, suffix)
    if suffix not in SUFFIXES:
        suffix = otherwise
    if suffix == ".parquet":
        if packed:
            raise UserError(f"{file} is gzipped Parquet, which is compressed already", remedy=f"gunzip {file}")
        return ParquetTable(file)
    data = _unpacked(file) if packed else None  # None: the file itself
    if (data or start)[:2] in UTF_16:  # as Excel and PowerShell write text
        data = _as_utf8(file, _content(file, data))
    elif b"\0" in (data or start)[:4]:
        remedy = f"if it is UTF-16, convert it: iconv -f utf-16le -t utf-8 {file} > NEW"
        raise UserError(f"{file} is not UTF-8: one of its first bytes is zero", remedy=remedy)
    if suffix == ".csv":
        return CsvTable(file, _content(file, data), None)
    if suffix == ".tsv":
        return CsvTable(file, _content(file, data), "\t")
    if suffix == ".json" or (data or start)[:1] == b"[":
        entries = _json_document(file, _content(file, data), whole=suffix == ".json")
        if entries is not None:
            return EntryTable(file, entries)
    return LineTable(file, data)


def _content(file: Path, data: bytes | None) -> bytes:
    """The content of a file, unless it is read already."""
    return file.read_bytes() if data is None else data


def _require_known(file: Path, suffix: str) -> None:
    """Raise UserError for the suffix of a format that is not read: its content would be called broken JSON."""
    if suffix in SUFFIXES or FORMAT_SUFFIX.fullmatch(suffix) is None:
        return

    remedy = "convert it to one of these, or rename it if it is one of these"
    if suffix in UNPACKED:
        remedy = f"unpack it: {UNPACKED[suffix]} {file}"
    elif suffix in OTHERS:
        remedy = OTHERS[suffix]
    raise UserError(f"{file} is none of {', '.join(SUFFIXES)}, possibly with .gz", remedy=remedy)


def _unpacked(file: Path) -> bytes:
    try:
        return gzip.decompress(file.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file} can't be unpacked: {error}; is it truncated?", remedy=f"gzip -t {file}") from None


def _as_utf8(file: Path, data: bytes) -> bytes:
    try:
        return data.decode("utf-16").encode()
    except UnicodeError as error:
        what = f"{file} begins as UTF-16, and is not: {error}"
        raise UserError(what[:200], remedy="is it truncated? write it as UTF-8") from None


class LineTable:
    """JSON Lines: one object per line. Lines are read on demand, those of a gzipped file from memory.

    Args:
        data: the unpacked file; None: the file itself.
    """

    fills_nulls: ClassVar[bool] = False

    def __init__(self, file: Path, data: bytes | None = None) -> None:
        self.file = file
        self._data = data

    def columns(self) -> tuple[str, ...] | None:
        return next((tuple(values) for _, _, values in self.scan()), None)

    def scan(self) -> Iterator[tuple[int, str, Values]]:
        for number, offset, line in content_lines(self.file, self._data):
            place = f"{self.file}:{number}"
            yield offset, place, _parsed(line, place)

    def read(self, position: int) -> Values:
        with _stream(self.file, self._data) as stream:
            stream.seek(position)
            return _parsed(stream.readline(), f"{self.file}, byte {position}")

    def place(self, position: int) -> str:
        with _stream(self.file, self._data) as stream:
            lines_above = stream.read(position).count(b"\n")
        return f"{self.file}:{lines_above + 1}"


class EntryTable:
    """The objects of a JSON list, in memory."""

    fills_nulls: ClassVar[bool] = False

    def __init__(self, file: Path, entries: Sequence[Values]) -> None:
        self.file = file
        self._entries = entries

    def columns(self) -> tuple[str, ...] | None:
        return tuple(self._entries[0]) if self._entries else None

    def scan(self) -> Iterator[tuple[int, str, Values]]:
        for number, values in enumerate(self._entries):
            yield number, self.place(number), values

    def read(self, position: int) -> Values:
        return self._entries[position]

    def place(self, position: int) -> str:
        return f"{self.file}, entry {position}"


class CsvTable:
    """CSV with a header line, by RFC 4180: quoted cells may contain delimiters, line ends and doubled quotes.

    Every cell is a text, so 07 stays 07; an empty cell is null. The encoding is UTF-8, with or without a byte order
    mark.

    Args:
        delimiter: None: that of Excel's first line `sep=;` if there is one, otherwise the one of `DELIMITERS` that is
            most frequent in the header outside quotes.

    Raises:
        UserError: the encoding is another, a row has more or fewer cells than the header, or a quote is unclosed; names
            the line.
    """

    fills_nulls: ClassVar[bool] = False

    def __init__(self, file: Path, data: bytes, delimiter: str | None) -> None:
        self.file = file
        self._data = data
        self._delimiter = delimiter

    @cached_property
    def _rows(self) -> tuple[list[str], list[tuple[int, list[str]]]]:
        """The header, and the line and the cells of each row."""
        try:
            text = self._data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            lines_above = self._data.count(b"\n", 0, error.start)
            place = f"{self.file}:{lines_above + 1}"
            remedy = f"if it is Latin-1, convert it: iconv -f latin1 -t utf-8 {self.file} > NEW"
            raise UserError(f"{place} is not UTF-8: {error.reason}", remedy=remedy) from None
        start = 0  # characters and lines before the header
        skipped = 0
        separator = SEPARATOR.match(text)
        if separator:
            delimiter = separator[1]
            start = separator.end()
            skipped = 1
        else:
            delimiter = self._delimiter or _delimiter(text)
        reader = csv.reader(io.StringIO(text[start:], newline=""), delimiter=delimiter, strict=True)
        limit = csv.field_size_limit(LONGEST_CELL)
        rows = list[tuple[int, list[str]]]()
        line = 0
        try:
            for cells in reader:
                if cells:  # not a blank line
                    rows.append((line + 1 + skipped, cells))
                line = reader.line_num
        except csv.Error as error:
            remedy = 'close the quote; inside a quoted cell a quote is written twice, ""'
            raise UserError(f"{self.file}:{line + 1 + skipped} is not CSV: {error}", remedy=remedy) from None
        finally:
            csv.field_size_limit(limit)
        if not rows:
            return [], []
        header = [name.strip() or f"column {number}" for number, name in enumerate(rows[0][1], 1)]
        if len(set(header)) < len(header):
            if looks_like_data(header):
                raise headless(self.file, header)
            twice = next(name for name in header if header.count(name) > 1)
            raise UserError(f"{self.file}:{rows[0][0]} has two columns {twice!r}", remedy=f"rename one; {HEADER}")
        for number, cells in rows[1:]:
            if len(cells) != len(header):
                what = f"{self.file}:{number} has {len(cells)} cells, and the header has {len(header)} columns"
                remedy = f"quote a cell that holds {json.dumps(delimiter)}; columns: {', '.join(header)}"
                raise UserError(what, remedy=remedy)
        return header, rows[1:]

    def columns(self) -> tuple[str, ...] | None:
        return tuple(self._rows[0]) or None

    def scan(self) -> Iterator[tuple[int, str, Values]]:
        _, rows = self._rows
        for number in range(len(rows)):
            yield number, self.place(number), self.read(number)

    def read(self, position: int) -> Values:
        header, rows = self._rows
        _, cells = rows[position]
        values: Values = {}
        for name, cell in zip(header, cells, strict=True):
            values[name] = utf8(cell) if cell else None
        return values

    def place(self, position: int) -> str:
        return f"{self.file}:{self._rows[1][position][0]}"


def looks_like_data(header: Iterable[str]) -> bool:
    """Return True if names of columns look like cells of a row: a number, a question, or a long sentence."""
    return any(DATA_CELL.fullmatch(name.strip()) for name in header)


def headless(file: Path, header: Iterable[str]) -> UserError:
    """The error for a CSV file whose first line seems to be data."""
    line = abbreviated(", ".join(map(repr, header)), LONGEST_VALUE)
    what = f"{file} seems to have no header line: its first line is {line}"
    return UserError(what, remedy="add a line above it that names the columns, such as question,answer")


def _delimiter(text: str) -> str:
    """The most frequent delimiter in the first non-blank line outside quotes. A comma if there is none, or if the next
    line has another number of them, because they are then part of a column's name."""
    beginning = text[:MOST_HEADER].lstrip("\r\n")
    unquoted = re.sub(r'"[^"]*"', "", beginning)
    header, *rest = re.split(r"[\r\n]+", unquoted, maxsplit=2)
    most = max(DELIMITERS, key=header.count)
    agrees = not rest or not rest[0] or rest[0].count(most) == header.count(most)
    return most if agrees or "," not in header else ","


class ParquetTable:
    """Parquet. Its columns are known without reading a row; columns that are read stay in memory, as Arrow.

    Raises:
        UserError: the file is damaged, a text in it is not UTF-8, or two columns have the same name; names the row if
            one is at fault.
    """

    fills_nulls: ClassVar[bool] = True

    def __init__(self, file: Path) -> None:
        self.file = file
        self._table: Any = None

    def columns(self) -> tuple[str, ...]:
        """The columns; UserError if the file is not Parquet."""
        from pyarrow import parquet

        with _damage_named(str(self.file)):
            names = tuple(parquet.read_schema(self.file).names)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{self.file} has two columns {twice!r}", remedy="rename one of them")
        return names

    def load(self, columns: Sequence[str] | None) -> int:
        """Read these columns, None: all; return the number of rows."""
        from pyarrow import parquet

        if columns is None:
            columns = self.columns()
        chosen = list(columns)
        with _damage_named(str(self.file), partial(deque, self.stream(chosen), 0)):
            table = parquet.read_table(self.file, columns=chosen)
            table.validate(full=True)  # texts too
        self._table = table
        return len(table)

    def stream(self, columns: Sequence[str]) -> Iterator[Values]:
        """Yield the rows with these columns; only a batch of them is in memory."""
        from pyarrow import parquet

        row = 0
        with _damage_named(str(self.file)):
            file = parquet.ParquetFile(self.file, pre_buffer=False)  # which would hold the whole file in memory
            batches = file.iter_batches(batch_size=BATCH, columns=list(columns), use_threads=False)
        while True:
            place = f"{self.file}, after row {row - 1}," if row else str(self.file)
            with _damage_named(place):
                batch = next(batches, None)
            if batch is None:
                return
            with _damage_named(str(self.file), partial(self._values_of_each, batch, row)):
                values = batch.to_pylist()
            yield from values
            row += batch.num_rows

    def _values_of_each(self, batch: Any, first: int) -> None:
        for index in range(batch.num_rows):
            with _damage_named(self.place(first + index)):
                batch.slice(index, 1).to_pylist()

    def scan(self) -> Iterator[tuple[int, str, Values]]:
        if self._table is None:
            self.load(None)
        for number in range(len(self._table)):
            yield number, self.place(number), self.read(number)

    def read(self, position: int) -> Values:
        with _damage_named(self.place(position)):
            values: Values = self._table.slice(position, 1).to_pylist()[0]
        return values

    def place(self, position: int) -> str:
        return f"{self.file}, row {position}"


@contextmanager
def _damage_named(place: str, locate: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Convert Arrow's errors, which have many types, to `UserError` with the place.

    Args:
        locate: called after an error; may raise one with a more exact place.
    """
    import pyarrow

    try:
        yield
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        locate()
        reason = " ".join(str(error).split())[:120]
        remedy = "write the file again: is it truncated?"
        if isinstance(error, UnicodeDecodeError):
            reason = f"a text is not UTF-8: {error.reason}"
            remedy = "write the file again, with its texts in UTF-8"
        raise UserError(f"{place} can't be read as Parquet: {reason}", remedy=remedy) from None


def _stream(file: Path, data: bytes | None) -> BinaryIO:
    """A stream of a file's content, or of the content that is given."""
    if data is None:
        return file.open("rb")
    return io.BytesIO(data)


def content_lines(file: Path, data: bytes | None = None) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, offset and content of each non-blank line; `data` is the unpacked content of a packed file."""
    offset = 0
    try:
        with _stream(file, data) as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, offset, line
                offset += len(line)
    except OSError as error:
        error.filename = str(file)  # the error of a failed read has no file name
        raise


def json_object(line: bytes, place: str) -> Values:
    """Parse the JSON object in a line; UserError if it contains anything else."""
    try:
        values = load_json(line)
    except TooDeepError:
        raise _too_deep(place) from None
    except ValueError as error:
        remedy = "repair or remove the line"
        if not line.endswith(b"\n"):
            remedy = f"was the file cut off? {remedy}"
        if b"\r" in line.strip():
            remedy = r"if its lines end in \r alone, rewrite them: tr '\r' '\n' < FILE > NEW"
        raise UserError(f"{place} is not JSON: {error}", remedy=remedy) from None
    if not isinstance(values, dict):
        raise UserError(f"{place} holds {json_type(values)}, expected an object with the columns as keys")
    return values


def _parsed(line: bytes, place: str) -> Values:
    """Parse the JSON object in a line."""
    values = json_object(line, place)
    surrogates = b"\\u" in line or b"\xed" in line  # escaped, or as the three bytes that UTF-8 forbids
    return _encodable(values) if surrogates else values


def _encodable(values: Values) -> Values:
    """Replace lone surrogates by `?`: scraped text contains them, but no tokenizer or file accepts them."""
    encodable: Values = json.loads(utf8(json.dumps(values, ensure_ascii=False)))
    return encodable


def _too_deep(place: str) -> UserError:
    return UserError(f"{place} is nested deeper than {MAX_DEPTH} levels", remedy="flatten or remove the line")


def _json_document(file: Path, data: bytes, *, whole: bool) -> list[Values] | None:
    """The objects of a JSON list, which may be the only list in an object, under a key of `LISTS`; or the only object
    of a file. None if the file has one object per line, or if it need not be a `whole` document and contains no
    objects."""
    try:
        document = load_json(data.removeprefix(b"\xef\xbb\xbf"))
    except TooDeepError:
        raise _too_deep(str(file)) from None
    except ValueError:
        return None
    inside = ""
    if isinstance(document, dict):
        lists = [key for key in LISTS if _of_objects(document.get(key)) and document.keys() - {key} <= ABOUT]
        if len(lists) == 1:
            inside = f" of {lists[0]!r}"
            document = document[lists[0]]
        else:
            document = [document]
    if not isinstance(document, list) or not (whole or _of_objects(document)):
        return None
    for index, entry in enumerate(document):
        if not isinstance(entry, dict):
            what = f"{file}: entry {index}{inside} is {json_type(entry)}"
            raise UserError(f"{what}, expected objects with the columns as keys")
    if b"\\u" in data or b"\xed" in data:
        return [_encodable(entry) for entry in document]
    return document


def _of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)
