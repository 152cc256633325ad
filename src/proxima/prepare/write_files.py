"""Writes prepared rows: Parquet with the same columns for every source, and JSON lines. Equal rows give equal bytes."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.prepare.decontaminate import OverlapMatch
from proxima.prepare.deduplicate import Deduplicator, Question
from proxima.prepare.normalize import question_key
from proxima.prepare.prompt_template import Template
from proxima.prepare.read_files import InputFile

_ROW_GROUP = 4096  # rows
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


class TableWriter:
    """Writes a Parquet file of `COLUMNS`, with one row group in memory."""

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        self._schema = _schema()
        self._file = parquet.ParquetWriter(path, self._schema, compression="zstd", compression_level=3)
        self._buffer: list[dict[str, Any]] = []
        self._rows = 0

    def add(self, row: dict[str, Any]) -> None:
        self._buffer.append(row)
        self._rows += 1
        if len(self._buffer) >= _ROW_GROUP:
            self._flush()

    def close(self) -> int:
        """Finish the file, and return its number of rows."""
        self._flush()
        self._file.close()
        return self._rows

    def _flush(self) -> None:
        import pyarrow

        if self._buffer:
            self._file.write_table(pyarrow.Table.from_pylist(self._buffer, schema=self._schema))
            self._buffer.clear()


def _schema() -> Any:
    import pyarrow as pa

    text, chat = pa.string(), pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    types = {"messages": chat, "level": pa.int8(), "row": pa.int64(), "repeats": pa.int32()}
    return pa.schema([(name, types.get(name, text)) for name in COLUMNS])


@dataclass
class SplitData:
    """A side of the source: its files, and their deduplicated rows."""

    inputs: tuple[InputFile, ...]
    distinct: Deduplicator


class SplitWriter:
    """Writes the tables of the two sides, each created with its first row."""

    def __init__(self, folder: Path, template: Template, sides: Mapping[str, SplitData]) -> None:
        self.test_questions: list[str] = []
        self._folder, self._template, self._sides = folder, template, sides
        self._tables: dict[str, TableWriter] = {}

    def write(self, side: str, item: Question, repeats: int) -> None:
        if side not in self._tables:
            self._tables[side] = TableWriter(self._folder / f"{side}.parquet")
        inputs = (self._sides.get(side) or self._sides["train"]).inputs
        row = {name: getattr(item, name) for name in COLUMNS if hasattr(item, name)}
        row |= {"id": question_key(item.question).hex(), "messages": self._template.messages(item.question)}
        self._tables[side].add({**row, "source": inputs[item.file].name, "repeats": repeats})
        if side == "test":
            self.test_questions.append(item.question)

    def close(self) -> dict[str, int]:
        """Finish the files, and return the number of rows of each."""
        return {f"{side}.parquet": table.close() for side, table in sorted(self._tables.items())}


class ExclusionLists:
    """The excluded rows and the reasons: `unreadable.jsonl`, `conflicts.jsonl`, `contaminated.jsonl`."""

    def __init__(self, sides: Mapping[str, SplitData]) -> None:
        self._sides = sides
        self.contaminated: list[dict[str, Any]] = []
        self.by_set: Counter[str] = Counter()  # training questions that each evaluation set excludes
        self.same_text: Counter[str] = Counter()
        self.conflicts_dropped = dict.fromkeys(sides, 0)

    def add_contaminated(self, item: Question, matches: Sequence[OverlapMatch]) -> None:
        self.by_set.update({match.where[0] for match in matches})
        self.same_text.update({match.where[0] for match in matches if not match.grams})
        overlaps = ((*match.where, match.grams) for match in matches[:8])
        meets = [{"set": of, "row": at, "same": not run, "run": next(iter(run), None)} for of, at, run in overlaps]
        self.contaminated.append({"question": item.question, "answer": item.answer, "row": item.row, "meets": meets})

    def write(self, folder: Path) -> dict[str, int]:
        """Write the lists that are not empty, and return the number of lines of each."""

        unreadable, conflicts = [], []
        for side, data in self._sides.items():
            names = [file.name for file in data.inputs]
            unreadable += [{"side": side, **row, "file": names[row["file"]]} for row in data.distinct.unreadable]
            for entry in data.distinct.questions() if data.distinct.counts.conflicts else ():
                if len(entry.answers) > 1:
                    self.conflicts_dropped[side] += entry.kept is None
                    kept = None if entry.kept is None else entry.kept.answer
                    conflicts.append({"side": side, "question": entry.question, "answers": entry.answers, "kept": kept})
        lists = {"conflicts.jsonl": conflicts, "contaminated.jsonl": self.contaminated, "unreadable.jsonl": unreadable}
        lists = {name: rows for name, rows in lists.items() if rows}
        for name, rows in lists.items():
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        return {name: len(rows) for name, rows in lists.items()}
