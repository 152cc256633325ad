"""Readers of published rows: one per format, chosen by the columns. To add one: a line in `READERS`."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from proxima.data import UserError

Values = Mapping[str, Any]


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
class RowReader:
    """Reads the rows of a format.

    Args:
        needs: required columns.
        takes: optional columns.
        read: builds the `SourceQuestion`; raises KeyError, TypeError or ValueError for a malformed row.
        any_of: columns of which at least one is required; empty: none is required.
    """

    needs: tuple[str, ...]
    takes: tuple[str, ...]
    read: Callable[[Values], SourceQuestion]
    any_of: tuple[str, ...] = ()

    def fits(self, columns: Iterable[str]) -> bool:
        present = set(columns)
        return present.issuperset(self.needs) and (not self.any_of or bool(present & set(self.any_of)))

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.needs, *self.any_of, *self.takes)


def _chat(values: Values) -> SourceQuestion:
    """DAPO-Math-17k, and data prepared for verl: a chat, with the answer inside `reward_model`."""
    rule, extra = _object(values["reward_model"]), _object(values.get("extra_info") or {})
    source_id = _first(extra, "index", "id")
    return SourceQuestion(_last_user_message(values["prompt"]), rule["ground_truth"], source_id=source_id)


def _last_user_message(prompt: Any) -> str:
    """Return the last user message; a prompt that is text is returned unchanged."""
    if isinstance(prompt, str):
        if not prompt.startswith("[{"):
            return prompt
        prompt = json.loads(prompt)
    contents = [message["content"] for message in prompt if message["role"] == "user"]
    if not contents:
        raise ValueError("the chat has no user message")
    return str(contents[-1])


def _object(value: Any) -> Mapping[str, Any]:
    parsed = json.loads(value) if isinstance(value, str) else value
    if not isinstance(parsed, Mapping):
        raise TypeError(f"{type(parsed).__name__} in place of an object")
    return parsed


def _problem(values: Values) -> SourceQuestion:
    r"""MATH, MATH-500, most copies of the AIME: the answer in its column, or the last `\boxed{…}` of the solution."""
    solution, answer = _text(values.get("solution")), values.get("answer")
    return SourceQuestion(
        str(values["problem"] or ""),
        solution if answer is None or answer == "" else answer,
        solution,
        _text(values.get("subject") or values.get("type")),
        _level(values.get("level")),
        _first(values, "unique_id", "id", "problem_idx", "url"),
    )


def _capital(values: Values) -> SourceQuestion:
    """Maxwell-Jia/AIME_2024."""
    solution, source_id = _text(values.get("Solution")), _first(values, "ID")
    return SourceQuestion(str(values["Problem"] or ""), values["Answer"], solution, source_id=source_id)


def _question(values: Values) -> SourceQuestion:
    """GSM8K, whose answer is a solution that ends in `#### number`, and sets with only the answer."""
    answer = values["answer"]
    before, marker, _ = str(answer).rpartition("####")
    solution = before.strip() if marker else _text(values.get("solution"))
    return SourceQuestion(
        str(values["question"] or ""),
        answer,
        solution or None,
        _text(values.get("subject")),
        _level(values.get("level")),
        _first(values, "unique_id", "id", "url"),
    )


def _prompt(values: Values) -> SourceQuestion:
    """A prompt and its final answer, which is called the solution in such sets."""
    return SourceQuestion(_last_user_message(values["prompt"]), values.get("solution", values.get("answer")))


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _level(value: Any) -> int | None:
    """Return 5 for `Level 5`, `5` or 5, and None for `Level ?`."""
    digits = str(value).removeprefix("Level ").strip()
    return int(digits) if digits in {"1", "2", "3", "4", "5"} else None


def _first(values: Values, *names: str) -> str | None:
    return next((str(values[name]) for name in names if values.get(name) is not None), None)


READERS: dict[str, RowReader] = {  # the first that fits is used
    "chat": RowReader(("prompt", "reward_model"), ("extra_info",), _chat),
    "problem": RowReader(
        ("problem",),
        ("subject", "type", "level", "unique_id", "id", "problem_idx", "url"),
        _problem,
        any_of=("answer", "solution"),
    ),
    "capital": RowReader(("Problem", "Answer"), ("Solution", "ID"), _capital),
    "question": RowReader(
        ("question", "answer"), ("solution", "subject", "level", "unique_id", "id", "url"), _question
    ),
    "prompt": RowReader(("prompt",), (), _prompt, any_of=("solution", "answer")),
}


def reader_for(columns: Iterable[str], source: str) -> RowReader:
    """Return the reader for these columns; UserError, with the columns found and those expected, if none fits."""
    present = list(columns)
    for reader in READERS.values():
        if reader.fits(present):
            return reader
    forms = "; ".join(", ".join(r.needs) + (f", {' or '.join(r.any_of)}" if r.any_of else "") for r in READERS.values())
    raise UserError(f"{source} has the columns {', '.join(present) or 'none'}; expected one of these forms: {forms}")
