"""JSON of the run folder: strict (no NaN), UTF-8, and records, in lines that stay readable after a kill mid-line."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from proxima.data.errors import UserError, safe_repr
from proxima.data.json_reader import load_json

# those of a record that are always numbers, beside all with a `/`
NUMBERS = frozenset(
    {"accuracy", "completions", "correct", "examples", "policy_version", "prompts", "questions", "time"}
)


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON text. A number that is not finite becomes null, because JSON has no NaN.

    Tensors and numpy scalars of one element become numbers, tuples become lists, and a lone surrogate, which UTF-8
    can't encode, a `?`. TypeError for a value that JSON can't express.
    """
    return utf8(json.dumps(_jsonable(value), ensure_ascii=False, allow_nan=False, indent=indent))


def json_text(value: Any) -> str:
    """The content of a JSON file that people read too."""
    return dumps(value, indent=2) + "\n"


def utf8(text: str) -> str:
    """Replace lone surrogates, which tokenizers and file names can produce and UTF-8 can't encode, by `?`."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if not isinstance(value, float) and hasattr(value, "item"):  # a 0-d tensor or numpy scalar
        return _jsonable(value.item())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"{type(value).__name__} can't be written as JSON: {value!r:.80}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a `.jsonl` file; empty if the file is missing. An incomplete last line is skipped; UserError,
    with file and line, if an earlier line is not a JSON object."""
    return [record for record, _ in lines_from(path)]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, as by `read_lines`; UserError also for one without a `kind` and a `step`, or with
    another value for a number."""
    records = read_lines(path)
    for number, record in enumerate(records, 1):
        check_record(record, f"{path}:{number}")
    return records


def check_record(record: Mapping[str, Any], place: str) -> None:
    """Raise UserError, with the place, for a record that is never written: readers compute with any of its numbers."""
    remedy = "restore the file or delete the line"
    step = record.get("step")
    if not isinstance(record.get("kind"), str) or type(step) is not int or not 0 <= step < 2**31:
        raise UserError(f"{place} has no kind and step", remedy=remedy)
    for name, value in record.items():
        if ("/" in name or name in NUMBERS) and not isinstance(value, int | float | None):
            reason = f"{place} has {safe_repr(value):.40} for {name:.80}, expected a number"
            raise UserError(reason, remedy=remedy)


def lines_from(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """The records from byte `start`, where a line begins, each with the byte offset after its line; otherwise as in
    `read_lines`."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        content = file.read()
    done = 0
    while (end := content.find(b"\n", done) + 1) > 0:  # 0: no newline, so the rest is empty or torn
        line = content[done:end]
        done = end
        try:
            record = load_json(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if end == len(content):
                return  # torn by a power cut that kept the length and lost the data
            remedy = "restore the file or delete the line"
            number = path.read_bytes().count(b"\n", 0, start + end)
            raise UserError(f"{path}:{number} is not a JSON object ({error})", remedy=remedy) from error
        yield record, start + end
