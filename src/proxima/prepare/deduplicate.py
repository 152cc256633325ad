"""Deduplication: counts repeats, finds questions with different answers, and lists rows without a readable answer.

Rows are streamed; each distinct question is kept once with each of its answers, because the last row may reveal a
conflict.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from proxima.prepare.catalog import Conflicts
from proxima.prepare.normalize import ANSWERS, question_key, text_hash
from proxima.prepare.read_files import SourceQuestion, SourceRow
from proxima.system.jsonl import utf8
from proxima.task.question_text import strip_instructions

LISTED = 10_000  # maximum of unreadable rows listed with their text; all are counted
_CACHED = 1 << 17  # hashes of raw rows, to recognise repeats without normalizing them

# markup that changes the appearance of an answer, not its value
_SPACING = re.compile(r"(?<!\\)\\(?:[,;:! ]|(?:left|right|quad|qquad)(?![A-Za-z]))")
_ANY_FRAC = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FRACTION = re.compile(r"\\frac(?:\{([^{}]*)\}|([^\\{}]))(?:\{([^{}]*)\}|([^\\{}]))")


@dataclass(frozen=True)
class Question(SourceQuestion):
    """A question with its canonical answer, as it will be written; `file` and `row` are numbers in its source."""

    file: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True)
class UniqueQuestion:
    """A distinct question.

    Args:
        kept: its first row, or the row selected by the rule for conflicts; None if it is dropped.
        repeats: number of rows.
        answers: each distinct answer with its number of rows; several are a conflict.
        question: its text, for the list of conflicts.
    """

    kept: Question | None
    repeats: int
    answers: dict[str, int]
    question: str


class Deduplicator:
    """Takes rows one by one, then yields the distinct questions in the order of their first row.

    Args:
        kind: of answer, a key in `ANSWERS`.
        rule: for questions with different answers: `drop` them, keep the `first` row, or the first row with the answer
            of the `majority` (without a majority the question is dropped).
    """

    def __init__(self, kind: str, rule: Conflicts = "drop") -> None:
        self._rows = 0
        self._canonical = ANSWERS[kind]
        self._rule = rule
        self._found: dict[bytes, dict[str, list[Any]]] = {}  # of a question, for each answer: first row, number of rows
        self._unreadable: dict[bytes, dict[str, Any]] = {}
        self._cache: dict[bytes, list[Any]] = {}

    def add(self, row: SourceRow) -> None:
        """Add one row."""
        self._rows += 1
        raw = row.content
        if raw is None:
            return self._list_unreadable(row, row.reason)
        if raw.answer is None:
            return self._list_unreadable(row, "has no answer")
        if not isinstance(raw.answer, (str, int, float)) or isinstance(raw.answer, bool):
            return self._list_unreadable(row, "has an answer that is neither text nor number")
        raw_hash = text_hash(f"{raw.answer}\0{raw.question}")
        entry = self._cache.get(raw_hash)
        if entry is None:
            answer, reason = self._canonical(raw.answer)
            if answer is None:
                return self._list_unreadable(row, f"has an answer that {reason}")
            question = utf8(strip_instructions(raw.question))
            if not question:
                return self._list_unreadable(row, "has no question")
            solution, subject, name = (text and utf8(text) for text in (raw.solution, raw.subject, raw.source_id))
            item = Question(question, utf8(answer), solution, subject, raw.level, name, row.file, row.row)
            answers = self._found.setdefault(question_key(question), {})
            entry = answers.setdefault(_comparable(item.answer), [item, 0])
            if len(self._cache) >= _CACHED:
                self._cache.clear()
            self._cache[raw_hash] = entry
        entry[1] += 1
        return None

    def _list_unreadable(self, row: SourceRow, reason: str) -> None:
        raw = row.content or SourceQuestion("", None)
        shown = {"question": utf8(strip_instructions(raw.question)), "answer": _excerpt(raw.answer), "reason": reason}
        key = text_hash(json.dumps([*shown.values()]))
        if key not in self._unreadable:
            if len(self._unreadable) < LISTED:
                text = {**shown, "file": row.file, "row": row.row}
            else:
                text = {}
            self._unreadable[key] = text | {"rows": 0}
        self._unreadable[key]["rows"] += 1

    @property
    def unreadable(self) -> list[dict[str, Any]]:
        """The unreadable questions, each with the reason and its number of rows; at most `LISTED`."""
        return list(self._unreadable.values())[:LISTED]

    @property
    def counts(self) -> dict[str, int]:
        """The rows so far: rows = unreadable_rows + repeats + questions."""
        unreadable = sum(entry["rows"] for entry in self._unreadable.values())
        questions = len(self._found)
        return {
            "rows": self._rows,
            "unreadable_rows": unreadable,
            "unreadable": len(self._unreadable),
            "repeats": self._rows - unreadable - questions,
            "questions": questions,
            "conflicts": sum(len(answers) > 1 for answers in self._found.values()),
        }

    def questions(self) -> Iterator[UniqueQuestion]:
        """Yield the distinct questions in the order of their first row."""
        for entries in self._found.values():
            answers = {item.answer: rows for item, rows in entries.values()}
            first, _ = next(iter(entries.values()))
            repeats = sum(answers.values())
            most, rows = max(entries.values(), key=lambda entry: entry[1])
            kept = None
            if len(answers) == 1 or self._rule == "first":
                kept = first
            elif self._rule == "majority" and 2 * rows > repeats:
                kept = most
            yield UniqueQuestion(kept, repeats, answers, first.question)


def _comparable(answer: str) -> str:
    r"""Normalize an answer: equal if only spacing, `\dfrac12` for `\frac{1}{2}`, `\left(`, `$` or a final period
    differ."""
    text = "".join(answer.split())
    if "\\" in answer:
        text = _ANY_FRAC.sub(r"\\frac", "".join(_SPACING.sub("", answer).split()))
        text = _FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text).replace("\\$", "")
    return text.replace("$", "").removesuffix(".") or text


def _excerpt(answer: Any) -> Any:
    if answer is None or isinstance(answer, (bool, int, float)):
        return answer
    return utf8(str(answer))[-200:]
