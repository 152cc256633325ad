"""Damages to the files of a run folder, drawn with a seed."""

import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Damage = Callable[[Path, random.Random], None]


def _gone(file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def a_folder(file: Path, draw: random.Random) -> None:
    _gone(file)
    file.mkdir()


def a_loop(file: Path, draw: random.Random) -> None:
    _gone(file)
    file.symlink_to(file.name)


def gone(file: Path, draw: random.Random) -> None:
    _gone(file)


def empty(file: Path, draw: random.Random) -> None:
    file.write_bytes(b"")


def cut(file: Path, draw: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content))])


def noise(file: Path, draw: random.Random) -> None:
    file.write_bytes(draw.randbytes(draw.choice([1, 100, 5000])))


def flipped(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(draw.choice([1, 1, 20])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def zeros(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    start = draw.randrange(len(content))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    file.write_bytes(content)


def not_utf8(file: Path, draw: random.Random) -> None:
    content = file.read_bytes()
    at = draw.randrange(len(content))
    file.write_bytes(content[:at] + b"\xff\xfe\x80" + content[at:])


ANYWHERE: tuple[Damage, ...] = (a_folder, a_loop, gone, empty, cut, noise, flipped, zeros, not_utf8)
VALUES: tuple[Any, ...] = (None, True, -1, 10**300, 1e308, "x", "", [], {}, [[]], {"a": None}, "\0", -0.5, [None])


def _changed(value: Any, draw: random.Random) -> Any:
    """The value with another one somewhere."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], _changed(value[at], draw), *value[at + 1 :]]
    return draw.choice(VALUES)


def other_value(file: Path, draw: random.Random) -> None:
    text = file.read_text()
    if file.suffix != ".jsonl":
        file.write_text(json.dumps(_changed(json.loads(text), draw)))
        return
    lines = text.splitlines()
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(_changed(json.loads(lines[at]), draw))
    file.write_text("\n".join(lines) + "\n")


def deep(file: Path, draw: random.Random) -> None:
    levels = draw.choice([150, 800, 100_000])
    file.write_text('{"kind": "train", "step": 1, "x": ' + "[" * levels + "]" * levels + "}\n")


def long_number(file: Path, draw: random.Random) -> None:
    file.write_text('{"kind": "train", "step": ' + "9" * draw.choice([400, 5000]) + "}\n")


def another_json(file: Path, draw: random.Random) -> None:
    file.write_text(json.dumps(draw.choice(VALUES)) + "\n")


JSON: tuple[Damage, ...] = (other_value, other_value, other_value, deep, long_number, another_json)


def other_column(file: Path, draw: random.Random) -> None:
    """Valid Parquet with a column missing, of another type, of nulls, or of texts that are no JSON."""
    table = pq.read_table(file, partitioning=None)
    name = draw.choice(table.column_names)
    at, rows = table.column_names.index(name), len(table)
    chosen = draw.choice([(), None, "{", -1, [10**9], 1e300, "[" * 5000])
    metadata = table.schema.metadata
    table = table.remove_column(at)
    if chosen != ():
        table = table.add_column(at, name, pa.array([chosen] * rows))
    pq.write_table(table.replace_schema_metadata(metadata), file)


def no_rows(file: Path, draw: random.Random) -> None:
    pq.write_table(pq.read_table(file, partitioning=None).slice(0, 0), file)


def text_not_utf8(file: Path, draw: random.Random) -> None:
    table = pq.read_table(file, partitioning=None)
    names = [field.name for field in table.schema if pa.types.is_string(field.type)]
    name = draw.choice(names)
    at = table.column_names.index(name)
    wrong = pa.array([b"\xff\xfe"] * len(table), pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(table), wrong.buffers())
    other = table.remove_column(at).add_column(at, pa.field(name, pa.string()), column)
    pq.write_table(other.replace_schema_metadata(table.schema.metadata), file)


PARQUET: tuple[Damage, ...] = (other_column, other_column, other_column, no_rows, text_not_utf8)


def other_rows(file: Path, draw: random.Random) -> None:
    """A journal with another value in a table."""
    db = sqlite3.connect(file)
    triggers = db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
    db.executescript("".join(f"DROP TRIGGER {name};" for (name,) in triggers))
    statement = draw.choice(
        [
            "UPDATE meta SET value = '['",
            "UPDATE meta SET value = 'null'",
            "UPDATE steps SET metrics = '{' WHERE step = 1",
            "DELETE FROM meta",
            "DELETE FROM steps",
            "DROP TABLE meta",
            "DROP TABLE checksums",
            "DELETE FROM checksums",
            "UPDATE checksums SET crc32 = x'00ff'",
            "UPDATE checksums SET size = 'x'",
            f"UPDATE steps SET metrics = '{'[' * 2000}'",
            "UPDATE steps SET step = 'x' WHERE step = 1",
        ]
    )
    with suppress(sqlite3.Error):  # a check of the schema
        db.executescript(statement)
    db.close()


def damages_of(file: Path) -> tuple[Damage, ...]:
    """The damages that fit a file."""
    own: dict[str, tuple[Damage, ...]] = {
        ".json": JSON,
        ".jsonl": JSON,
        ".parquet": PARQUET,
        ".sqlite": (other_rows,) * 3,
    }
    return (*ANYWHERE, *own.get(file.suffix, ()))
