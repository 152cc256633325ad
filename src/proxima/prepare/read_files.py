"""Reads source files as a stream of rows: Parquet, of which one batch is in memory, and what tasks read; and hashes
them."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.data.json_reader import json_type, load_json
from proxima.task.file_formats import SUFFIXES, ParquetTable, data_suffix, open_data_file
from proxima.task.published_chats import as_messages


@dataclass(frozen=True, slots=True)
class SourceQuestion:
    """A row in the form of the source.

    Args:
        question: with the instructions of the source around it.
        answer: a number, a text, or a whole solution; None if the row has none.
        solution: a worked solution, if the source has one besides the answer.
        subject: `algebra` …; None: unknown.
        level: difficulty, 1 … 5; None: unknown.
        source_id: the row's name in the source.
    """

    question: str
    answer: Any
    solution: str | None = None
    subject: str | None = None
    level: int | None = None
    source_id: str | None = None


@dataclass(frozen=True)
class InputFile:
    """A source file.

    Args:
        path: on this machine.
        name: in the card: the path within the folder or data set, which does not depend on the machine.
        size: bytes.
        sha256: of its bytes, hex.
    """

    path: Path
    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row with its file number and row number; `content` is None if the row is malformed, with the reason."""

    content: SourceQuestion | None
    file: int
    row: int
    reason: str = ""


def inspect_file(path: Path, name: str) -> InputFile:
    """Hash a file; UserError, with its path, if it can't be read."""
    try:
        with path.open("rb") as stream:
            return InputFile(path, name, path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None


def iter_source_rows(inputs: Sequence[InputFile]) -> Iterator[SourceRow]:
    """Yield the rows of all files, in order; UserError if a file is damaged, or its columns are of no known form."""
    for index, file in enumerate(inputs):
        for row, values in enumerate(_values(file.path)):
            if row == 0:
                known_columns(values, str(file.path))
            try:
                yield SourceRow(read_row(values), index, row)
            except KeyError as error:
                yield SourceRow(None, index, row, f"has no {error.args[0]!r}")
            except (TypeError, ValueError, AttributeError) as error:
                yield SourceRow(None, index, row, f"has another form: {error}")


def is_data_file(name: str | Path) -> bool:
    """True if the suffix of a file is that of a format that can be read."""
    return data_suffix(Path(name)) in SUFFIXES


def _values(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the columns of each row."""
    table = open_data_file(path)
    if isinstance(table, ParquetTable):
        yield from table.stream(known_columns(table.columns(), str(path)))
    else:
        yield from (values for _, _, values in table.scan())


def combined_sha256(inputs: Sequence[InputFile]) -> str:
    """Return one hash for several files, or the file's own hash for a single one."""
    if len(inputs) == 1:
        return inputs[0].sha256
    return hashlib.sha256("".join(f"{file.sha256} {file.name}\n" for file in inputs).encode()).hexdigest()


Values = Mapping[str, Any]


# Columns of published data sets, the first that is there is used.
QUESTION = ("problem", "Problem", "question", "prompt")
CHATS = ("messages", "conversations")  # of whole chats, ShareGPT's among them
ANSWER = ("reward_model", "answer", "Answer", "solution")
SOLUTION = ("solution", "Solution")
SUBJECT = ("subject", "type")
NAME = ("unique_id", "id", "ID", "problem_idx", "url")
COLUMNS = frozenset((*QUESTION, *CHATS, *ANSWER, *SOLUTION, *SUBJECT, *NAME, "level", "extra_info"))


def known_columns(columns: Iterable[str], source: str) -> list[str]:
    """Return the columns that are read; UserError, with those found and those expected, without question or answer."""
    present = list(columns)
    whole = any(name in present for name in CHATS)  # a chat may hold its answer
    if not whole and not all(any(name in present for name in names) for names in (QUESTION, ANSWER)):
        expected = f"a question ({', '.join(QUESTION)}) and an answer ({', '.join(ANSWER)}), or {' or '.join(CHATS)}"
        raise UserError(f"{source} has the columns {', '.join(present) or 'none'}; expected {expected}")
    return [name for name in present if name in COLUMNS]


def read_row(values: Values) -> SourceQuestion:
    r"""Read a row of any published form; raises KeyError, TypeError or ValueError for a malformed one.

    DAPO-Math-17k and data prepared for verl: a chat, with the answer inside `reward_model`. A prompt alone: its final
    answer is called the solution in such sets. GSM8K: the answer is a solution that ends in `#### number`. MATH, most
    copies of the AIME: the answer in its column, or the last `\boxed{…}` of the solution. A whole
    chat: its user's only turn is the question, and the assistant's turn after it the answer, unless a column has that.
    """
    if not any(name in values for name in QUESTION):
        column = next((name for name in CHATS if name in values), None)
        if column is not None:
            values = {**_chat(values[column], column), **values}
    if "prompt" in values and "reward_model" in values:
        question = _last_user_message(values["prompt"])
        rule = _object(values["reward_model"])
        extra = _object(values.get("extra_info") or {})
        return SourceQuestion(question, rule["ground_truth"], source_id=_first(extra, "index", "id"))
    name = next((name for name in QUESTION if name in values), "prompt")
    if name == "prompt":
        question = _last_user_message(values["prompt"])
    else:
        question = _text(values[name])
    answer = next((values[name] for name in ("answer", "Answer") if values.get(name) not in (None, "")), None)
    if name == "prompt":
        return SourceQuestion(question, values.get("solution", answer))
    solution = _first(values, *SOLUTION)
    before, marker, _ = str(answer).rpartition("####")
    if marker:
        solution = before.strip() or None
    if answer is None:
        answer = solution
    written = str(values.get("level")).removeprefix("Level ").strip()  # `Level 5`, `5` or 5; `Level ?` is unknown
    level = int(written) if written in {"1", "2", "3", "4", "5"} else None
    return SourceQuestion(question, answer, solution, _first(values, *SUBJECT), level, _first(values, *NAME))


def _chat(value: Any, column: str) -> Values:
    """The question of a chat, and its answer if the assistant gives one; ValueError for several turns of the user."""
    try:
        chat = as_messages(value, f"column {column!r}")
    except UserError as error:
        raise ValueError(str(error)) from None
    users = [message["content"] for message in chat if message["role"] == "user"]
    if len(users) != 1:
        raise ValueError(f"the chat has {len(users)} turns of the user, but a question must be a single one")
    read = {"question": users[0]}
    if chat[-1]["role"] == "assistant":
        read["answer"] = chat[-1]["content"]
    return read


def _text(question: Any) -> str:
    """Return a question, empty for null; TypeError for anything that is not text, such as a chat or a number."""
    if not isinstance(question, str | None):
        raise TypeError(f"the question is {json_type(question)}, not text")
    return question or ""


def _last_user_message(prompt: Any) -> str:
    """Return the last user message; a prompt that is text is returned unchanged."""
    if isinstance(prompt, str):
        if not prompt.startswith("[{"):
            return prompt
        prompt = load_json(prompt)
    contents = [message["content"] for message in prompt if message["role"] == "user"]
    if not contents:
        raise ValueError("the chat has no user message")
    return str(contents[-1])


def _object(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        parsed = load_json(value)
    else:
        parsed = value
    if not isinstance(parsed, Mapping):
        raise TypeError(f"{json_type(parsed)} in place of an object")
    return parsed


def _first(values: Values, *names: str) -> str | None:
    return next((str(values[name]) for name in names if values.get(name) not in (None, "")), None)
