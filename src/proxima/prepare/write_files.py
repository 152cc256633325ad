"""Writes prepared rows: Parquet with the same columns for every source, and JSON lines. Equal rows give equal bytes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

LISTS = {
    "conflicts.jsonl": "questions with more than one answer, and what was kept",
    "contaminated.jsonl": "training questions excluded because they overlap with an evaluation question: the set, the "
    "row, the shared run of words",
    "unreadable.jsonl": "rows without a question or a readable answer, each with the reason",
}


@dataclass
class SplitData:
    """A side of the source: its files, and their deduplicated rows."""

    inputs: tuple[InputFile, ...]
    distinct: Deduplicator


@dataclass
class SplitOutcome:
    """What is written: the questions of each side with their repeats, and training questions that are excluded, each
    with the evaluation questions that it overlaps with."""

    kept: dict[str, list[tuple[Question, int]]] = field(default_factory=lambda: {"test": [], "train": []})
    contaminated: list[tuple[Question, Sequence[OverlapMatch]]] = field(default_factory=list)


def write_tables(
    folder: Path, template: Template, sides: Mapping[str, SplitData], outcome: SplitOutcome
) -> dict[str, int]:
    """Write the tables of the sides that have rows, and return the number of rows of each."""
    import pyarrow as pa
    from pyarrow import parquet

    chat = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    types = {"messages": chat, "level": pa.int8(), "row": pa.int64(), "repeats": pa.int32()}
    schema = pa.schema([(name, types.get(name, pa.string())) for name in COLUMNS])
    written: dict[str, int] = {}
    for side, kept in outcome.kept.items():
        if not kept:
            continue
        inputs = (sides.get(side) or sides["train"]).inputs
        rows = []
        for item, repeats in kept:
            row = {name: getattr(item, name) for name in COLUMNS if hasattr(item, name)}
            row["id"] = question_key(item.question).hex()
            row["messages"] = template.messages(item.question)
            row["source"] = inputs[item.file].name
            row["repeats"] = repeats
            rows.append(row)
        file = f"{side}.parquet"
        table = pa.Table.from_pylist(rows, schema=schema)
        parquet.write_table(table, folder / file, _ROW_GROUP, compression="zstd", compression_level=3)
        written[file] = len(kept)
    return written


def _meeting(match: OverlapMatch) -> dict[str, Any]:
    """An evaluation question that a question meets, and the first words that they share; null if all are the same."""
    eval_set, row = match.where
    first = match.grams[0] if match.grams else None
    return {"set": eval_set, "row": row, "same": first is None, "run": first}


def write_lists(folder: Path, sides: Mapping[str, SplitData], outcome: SplitOutcome) -> dict[str, int]:
    """Write the lists of excluded rows that are not empty, and return the number of lines of each."""
    lists: dict[str, list[dict[str, Any]]] = {name: [] for name in LISTS}
    for side, data in sides.items():
        for row in data.distinct.unreadable:
            lists["unreadable.jsonl"].append({"side": side, **row, "file": data.inputs[row["file"]].name})
        for entry in data.distinct.questions():
            if len(entry.answers) > 1:
                kept = entry.kept and entry.kept.answer
                line = {"side": side, "question": entry.question, "answers": entry.answers, "kept": kept}
                lists["conflicts.jsonl"].append(line)
    for item, matches in outcome.contaminated:
        meets = list(map(_meeting, matches[:8]))
        line = {"question": item.question, "answer": item.answer, "row": item.row, "meets": meets}
        lists["contaminated.jsonl"].append(line)
    lists = {name: rows for name, rows in lists.items() if rows}
    for name, rows in lists.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return {name: len(rows) for name, rows in lists.items()}
