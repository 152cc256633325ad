"""Deduplication: counts repeats, finds questions with different answers, and lists rows without a readable answer.

Rows are streamed; only a hash and a count of each distinct question, and the few listed rows, are kept in memory. The
first row of each question is kept in a spool file until all rows are read, because the last row may reveal a conflict.
"""

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from hashlib import blake2b
from typing import IO, Any, Literal

from proxima.data.jsonl import utf8
from proxima.prepare.answer_kinds import ANSWERS
from proxima.prepare.normalize import question_key, strip_instructions
from proxima.prepare.read_files import SourceRow
from proxima.prepare.row_formats import SourceQuestion

LISTED = 10_000  # maximum of unreadable rows listed with their text; all are counted
_CACHED = 1 << 17  # hashes of raw rows, to recognise repeats without normalizing them

# markup that changes the appearance of an answer, not its value
_SPACING = re.compile(r"(?<!\\)\\(?:[,;:! ]|(?:left|right|quad|qquad)(?![A-Za-z]))")
_ANY_FRAC = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FRACTION = re.compile(r"\\frac(?:\{([^{}]*)\}|([^\\{}]))(?:\{([^{}]*)\}|([^\\{}]))")

Conflicts = Literal["drop", "first", "majority"]


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


@dataclass
class RowCounts:
    """Counts of rows: rows = unreadable_rows + repeats + questions."""

    rows: int = 0
    unreadable_rows: int = 0
    unreadable: int = 0
    repeats: int = 0
    questions: int = 0
    conflicts: int = 0
    repetition: Counter[int] = field(default_factory=Counter)


class Deduplicator:
    """Takes rows one by one, then yields the distinct questions in the order of their first row.

    Args:
        kind: of answer, a key in `ANSWERS`.
        spool: a text file, open for writing and reading, for the first rows.
        rule: for questions with different answers: `drop` them, keep the `first` row, or the first row with the answer
            of the `majority` (without a majority the question is dropped).
    """

    def __init__(self, kind: str, spool: IO[str], rule: Conflicts = "drop") -> None:
        self.counts = RowCounts()
        self.unreadable: list[dict[str, Any]] = []
        self._canonical, self._spool, self._rule = ANSWERS[kind], spool, rule
        self._index: dict[bytes, int] = {}
        self._repeats = array("q")
        self._answers = array("Q")  # an 8-byte hash of each question's first answer
        self._others: dict[int, dict[str, tuple[int, Question]]] = {}  # of conflicts: answers other than the first
        self._listed: dict[bytes, int] = {}
        self._cache: dict[bytes, int] = {}

    def add(self, row: SourceRow) -> None:
        """Add one row."""
        self.counts.rows += 1
        raw = row.content
        if raw is None:
            return self._list_unreadable(row, row.reason)
        if raw.answer is None:
            return self._list_unreadable(row, "has no answer")
        if not isinstance(raw.answer, (str, int, float)) or isinstance(raw.answer, bool):
            return self._list_unreadable(row, "has an answer that is neither text nor number")
        raw_hash = _hash(f"{raw.answer}\0{raw.question}")
        if (repeated := self._cache.get(raw_hash)) is not None:
            self._repeats[repeated] += 1
            return None
        answer, reason = self._canonical(raw.answer)
        if answer is None:
            return self._list_unreadable(row, f"has an answer that {reason}")
        question = utf8(strip_instructions(raw.question))
        if not question:
            return self._list_unreadable(row, "has no question")
        solution, subject, name = (text and utf8(text) for text in (raw.solution, raw.subject, raw.source_id))
        item = Question(question, utf8(answer), solution, subject, raw.level, name, row.file, row.row)
        if (index := self._place(item)) is not None:
            if len(self._cache) >= _CACHED:
                self._cache.clear()
            self._cache[raw_hash] = index
        return None

    def _place(self, item: Question) -> int | None:
        """Count the item, and return the number of its question; None if its answer differs from the first row's."""
        key, answer = question_key(item.question), int.from_bytes(_hash(_comparable(item.answer), 8), "big")
        index = self._index.setdefault(key, len(self._repeats))
        if index == len(self._repeats):
            self._repeats.append(1)
            self._answers.append(answer)
            json.dump(astuple(item), self._spool, ensure_ascii=False)
            self._spool.write("\n")
            return index
        self._repeats[index] += 1
        if self._answers[index] == answer:
            return index
        others = self._others.setdefault(index, {})
        answer_key = _comparable(item.answer)
        count, first = others.get(answer_key, (0, item))
        others[answer_key] = count + 1, first
        return None

    def _list_unreadable(self, row: SourceRow, reason: str) -> None:
        self.counts.unreadable_rows += 1
        raw = row.content or SourceQuestion("", None)
        shown = {"question": utf8(strip_instructions(raw.question)), "answer": _excerpt(raw.answer)}
        key = _hash(json.dumps([*shown.values(), reason]))
        if key not in self._listed:
            self._listed[key] = len(self.unreadable)
            self.counts.unreadable += 1
            if len(self.unreadable) < LISTED:
                self.unreadable.append({**shown, "reason": reason, "file": row.file, "row": row.row, "rows": 0})
        if self._listed[key] < len(self.unreadable):
            self.unreadable[self._listed[key]]["rows"] += 1

    def close(self) -> None:
        """Compute the counts after the last row."""
        self.counts.questions = len(self._repeats)
        self.counts.repeats = sum(self._repeats) - len(self._repeats)
        self.counts.conflicts = len(self._others)
        self.counts.repetition = Counter(self._repeats)
        self._cache.clear()
        self._index.clear()

    def questions(self) -> Iterator[UniqueQuestion]:
        """Yield the distinct questions in the order of their first row."""
        self._spool.flush()
        self._spool.seek(0)
        for index, line in enumerate(self._spool):
            first = Question(*json.loads(line))
            others = self._others.get(index)
            if others is None:
                yield UniqueQuestion(first, self._repeats[index], {first.answer: self._repeats[index]}, first.question)
                continue
            answers = {first.answer: self._repeats[index] - sum(count for count, _ in others.values())}
            answers |= {item.answer: count for count, item in others.values()}
            kept = {"drop": None, "first": first, "majority": _majority(first, answers, others)}[self._rule]
            yield UniqueQuestion(kept, self._repeats[index], answers, first.question)


def _majority(first: Question, answers: dict[str, int], others: dict[str, tuple[int, Question]]) -> Question | None:
    items = {first.answer: first} | {item.answer: item for _, item in others.values()}
    answer, count = max(answers.items(), key=lambda pair: pair[1])
    return items[answer] if 2 * count > sum(answers.values()) else None


def _comparable(answer: str) -> str:
    r"""Normalize an answer: equal if only spacing, `\dfrac12` for `\frac{1}{2}`, `\left(`, `$` or a final period
    differ."""
    text = "".join(answer.split())
    if "\\" in answer:
        text = _ANY_FRAC.sub(r"\\frac", "".join(_SPACING.sub("", answer).split()))
        text = _FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text).replace("\\$", "")
    return text.replace("$", "").removesuffix(".") or text


def _hash(text: str, size: int = 16) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


def _excerpt(answer: Any) -> Any:
    return answer if answer is None or isinstance(answer, (bool, int, float)) else utf8(str(answer))[-200:]
