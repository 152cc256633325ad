"""Rows of published files into questions: one reader a format, chosen by the columns that are there. To add one: a line
in `READERS`."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from proxima.data import UserError

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SourceQuestion:
    """A row as the source has it.

    Args:
        question: with the instructions that the source puts around it.
        answer: what the kind of answer reads: a number, a text, a whole solution; None: the row has none.
        solution: a worked solution, where the source has one besides the answer.
        subject: `algebra` …; None: the source doesn't say.
        level: difficulty, 1 … 5; None: the source doesn't say.
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
    """How a format is read.

    Args:
        needs: columns that must be there.
        takes: columns that are read besides, where they are there.
        read: a row's values into `SourceQuestion`; raises KeyError, TypeError or ValueError for another form.
        any_of: at least one of these must be there; empty: no such rule.
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
    """The rows of DAPO-Math-17k, and of data prepared for verl: a chat, the answer inside `reward_model`."""
    prompt, rule, extra = values["prompt"], _object(values["reward_model"]), _object(values.get("extra_info") or {})
    name = extra.get("index", extra.get("id"))
    return SourceQuestion(_asked(prompt), rule["ground_truth"], source_id=None if name is None else str(name))


def _asked(prompt: Any) -> str:
    """The last thing that the user says; a prompt that is plain text is that text."""
    if isinstance(prompt, str):
        if not prompt.startswith("[{"):
            return prompt
        prompt = json.loads(prompt)
    said = [message["content"] for message in prompt if message["role"] == "user"]
    if not said:
        raise UserError("nothing is said by the user")
    return str(said[-1])


def _object(value: Any) -> Mapping[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, Mapping):
        raise TypeError(f"{type(found).__name__} in place of an object")
    return found


def _problem(values: Values) -> SourceQuestion:
    r"""The rows of MATH, MATH-500 and most copies of the AIME: the answer in its column, or in the last `\boxed{…}` of
    the solution."""
    solution = _text(values.get("solution"))
    answer = values.get("answer")
    missing = answer is None or answer == ""
    return SourceQuestion(
        str(values["problem"] or ""),
        solution if missing else answer,
        solution,
        _text(values.get("subject") or values.get("type")),
        _level(values.get("level")),
        _first(values, "unique_id", "id", "problem_idx", "url"),
    )


def _capital(values: Values) -> SourceQuestion:
    """The rows of Maxwell-Jia/AIME_2024."""
    return SourceQuestion(
        str(values["Problem"] or ""), values["Answer"], _text(values.get("Solution")), source_id=_first(values, "ID")
    )


def _question(values: Values) -> SourceQuestion:
    """The rows of GSM8K, where the answer is a solution that ends in `#### number`, and of sets with a bare answer."""
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
    """Rows of a prompt and its final answer, which such sets call the solution."""
    return SourceQuestion(_asked(values["prompt"]), values.get("solution", values.get("answer")))


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _level(value: Any) -> int | None:
    """`Level 5` or 5; `Level ?` has none."""
    digits = str(value).removeprefix("Level ").strip()
    return int(digits) if digits in {"1", "2", "3", "4", "5"} else None


def _first(values: Values, *names: str) -> str | None:
    return next((str(values[name]) for name in names if values.get(name) is not None), None)


READERS: dict[str, RowReader] = {  # in this order: the first that fits is taken
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
    """The reader of these columns.

    Raises:
        ValueError: none fits; names the columns found and those that would do.
    """
    present = list(columns)
    for reader in READERS.values():
        if reader.fits(present):
            return reader
    forms = "; ".join(", ".join(r.needs) + (f", {' or '.join(r.any_of)}" if r.any_of else "") for r in READERS.values())
    raise UserError(f"{source} has the columns {', '.join(present) or 'none'}; wanted is one of these forms: {forms}")
