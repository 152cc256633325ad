"""What is written: Parquet with the same columns for every source, and JSON lines; the same rows give the same
bytes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from proxima.data import Message
from proxima.prepare.deduplicate import Question
from proxima.prepare.normalize import question_key
from proxima.prepare.prompt_template import Template

_ROWS = 4096  # in a row group
COLUMNS = {
    "id": "hash of the normalised question, 32 hex digits: the same in every set and version",
    "question": "the question alone",
    "answer": "the canonical answer",
    "messages": "what the model is asked: system prompt, and the question in its template",
    "solution": "a worked solution, null where the source has none",
    "subject": "null where the source does not say",
    "level": "difficulty, 1 … 5, null where the source does not say",
    "source": "the file of the source",
    "source_id": "the row's name in the source, null where it has none",
    "row": "the row's number in the file, from 0: the first that held the question",
    "repeats": "rows of the source that hold the question",
}


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row of the written table, see `COLUMNS`."""

    id: str
    question: str
    answer: str
    messages: list[Message]
    solution: str | None
    subject: str | None
    level: int | None
    source: str
    source_id: str | None
    row: int
    repeats: int

    @classmethod
    def of(cls, item: Question, repeats: int, source: str, template: Template) -> "PreparedRow":
        return cls(
            question_key(item.question).hex(),
            item.question,
            item.answer,
            template.messages(item.question),
            item.solution,
            item.subject,
            item.level,
            source,
            item.source_id,
            item.row,
            repeats,
        )


class TableWriter:
    """A Parquet file, a row group in memory at a time."""

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        self._schema = _schema()
        self._file = parquet.ParquetWriter(path, self._schema, compression="zstd", compression_level=3)
        self._waiting: list[PreparedRow] = []
        self._rows = 0

    def add(self, row: PreparedRow) -> None:
        self._waiting.append(row)
        self._rows += 1
        if len(self._waiting) >= _ROWS:
            self._flush()

    def close(self) -> int:
        """Rows written."""
        self._flush()
        self._file.close()
        return self._rows

    def _flush(self) -> None:
        import pyarrow

        if self._waiting:
            columns = {field.name: [getattr(row, field.name) for row in self._waiting] for field in fields(PreparedRow)}
            self._file.write_table(pyarrow.table(columns, schema=self._schema))
            self._waiting.clear()


def _schema() -> Any:
    import pyarrow as pa

    text, chat = pa.string(), pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    types = {"messages": chat, "level": pa.int8(), "row": pa.int64(), "repeats": pa.int32()}
    return pa.schema([(field.name, types.get(field.name, text)) for field in fields(PreparedRow)])


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> int:
    """JSON Lines; returns how many."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return len(rows)
