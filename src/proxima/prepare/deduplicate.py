"""Each question once: repeats are counted, different answers to one question are a conflict, answers that are none are
listed.

Rows stream through; in memory stay a hash and a count of each distinct question, and the few rows that are listed. The
first row of each question waits in a spool file until all are read, because a conflict may show in the last row.
"""

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import IO, Any, Literal

from proxima.prepare.answer_kinds import ANSWERS
from proxima.prepare.normalize import question_key, sound, strip_instructions
from proxima.prepare.read_files import SourceRow

LISTED = 10_000  # rows of a list that are kept with their text; all are counted
_REMEMBERED = 1 << 17  # hashes of rows as written, recognised without normalising them again

_SPACE = re.compile(
    r"(?<!\\)\\(?:[,;:! ]|(?:left|right|quad|qquad)(?![A-Za-z]))"
)  # that changes how an answer looks, not what it is
_ANY_FRAC = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FRACTION = re.compile(r"\\frac(?:\{([^{}]*)\}|([^\\{}]))(?:\{([^{}]*)\}|([^\\{}]))")

Conflicts = Literal["drop", "first", "majority"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its answer, as it will be written."""

    question: str
    answer: str
    solution: str | None
    subject: str | None
    level: int | None
    source_id: str | None
    file: int
    row: int


@dataclass(frozen=True, slots=True)
class UniqueQuestion:
    """A distinct question.

    Args:
        item: its first row, or the row that the conflict's rule prefers; None: dropped.
        repeats: rows that hold it.
        answers: each different answer with the rows that give it; one, unless it is a conflict.
        question: for the list of conflicts.
    """

    item: Question | None
    repeats: int
    answers: dict[str, int]
    question: str


@dataclass
class RowCounts:
    """What was counted. rows = unreadable_rows + repeats + questions."""

    rows: int = 0
    unreadable_rows: int = 0
    unreadable: int = 0
    repeats: int = 0
    questions: int = 0
    conflicts: int = 0
    repetition: Counter[int] = field(default_factory=Counter)


class Deduplicator:
    """Takes rows, gives entries in the order of their first row.

    Args:
        kind: of answer, a key in `ANSWERS`.
        spool: a text file open for writing and reading, for the questions' first rows.
    """

    def __init__(self, kind: str, spool: IO[str]) -> None:
        self.tally = RowCounts()
        self.unreadable: list[dict[str, Any]] = []
        self._reading, self._spool = ANSWERS[kind], spool
        self._index: dict[bytes, int] = {}
        self._repeats = array("q")
        self._answers = array("Q")  # 8 bytes of the hash of each question's first answer
        self._others: dict[int, dict[str, tuple[int, Question]]] = {}  # of conflicts: answers other than the first
        self._bad: dict[bytes, int] = {}
        self._remembered: dict[bytes, int] = {}

    def add(self, placed: SourceRow) -> None:
        """Take one row."""
        self.tally.rows += 1
        raw = placed.raw
        if raw is None:
            return self._refuse(placed, placed.reason)
        if raw.answer is None:
            return self._refuse(placed, "has no answer")
        if not isinstance(raw.answer, (str, int, float)) or isinstance(raw.answer, bool):
            return self._refuse(placed, "has an answer that is neither text nor number")
        written = blake2b(f"{raw.answer}\0{raw.question}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._remembered.get(written)
        if known is not None:
            self._repeats[known] += 1
            return None
        answer, reason = self._reading(raw.answer)
        if answer is None:
            return self._refuse(placed, f"has an answer that {reason}")
        question = sound(strip_instructions(raw.question))
        if not question:
            return self._refuse(placed, "has no question")
        item = Question(
            question,
            sound(answer),
            _sound(raw.solution),
            _sound(raw.subject),
            raw.level,
            _sound(raw.source_id),
            placed.file,
            placed.row,
        )
        index = self._place(item)
        if index is not None:
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            self._remembered[written] = index
        return None

    def _place(self, item: Question) -> int | None:
        """The number of the item's question; None where its answer is not the first row's."""
        key, answer = question_key(item.question), _hashed(item.answer)
        index = self._index.setdefault(key, len(self._repeats))
        if index == len(self._repeats):
            self._repeats.append(1)
            self._answers.append(answer)
            json.dump([getattr(item, name) for name in Question.__slots__], self._spool, ensure_ascii=False)
            self._spool.write("\n")
            return index
        self._repeats[index] += 1
        if self._answers[index] == answer:
            return index
        others = self._others.setdefault(index, {})
        name = _plain(item.answer)
        count, first = others.get(name, (0, item))
        others[name] = count + 1, first
        return None

    def _refuse(self, placed: SourceRow, reason: str) -> None:
        self.tally.unreadable_rows += 1
        raw = placed.raw
        shown = {
            "question": "" if raw is None else sound(strip_instructions(raw.question)),
            "answer": None if raw is None else _shown(raw.answer),
        }
        key = blake2b(json.dumps([*shown.values(), reason]).encode(), digest_size=16).digest()
        if key not in self._bad:
            self._bad[key] = len(self.unreadable)
            self.tally.unreadable += 1
            if len(self.unreadable) < LISTED:
                self.unreadable.append({**shown, "reason": reason, "file": placed.file, "row": placed.row, "rows": 0})
        if self._bad[key] < len(self.unreadable):
            self.unreadable[self._bad[key]]["rows"] += 1

    def close(self) -> None:
        """All rows are in: settle the counts."""
        self.tally.questions = len(self._repeats)
        self.tally.repeats = sum(self._repeats) - len(self._repeats)
        self.tally.conflicts = len(self._others)
        self.tally.repetition = Counter(self._repeats)
        self._remembered.clear()
        self._index.clear()

    def entries(self, rule: Conflicts) -> Iterator[UniqueQuestion]:
        """The distinct questions in the order of their first row.

        Args:
            rule: `drop` a question with different answers, keep its `first` row, or the answer that the `majority` of
                its rows gives (the earliest row with it); without a majority it is dropped.
        """
        self._spool.flush()
        self._spool.seek(0)
        for index, line in enumerate(self._spool):
            first = Question(*json.loads(line))
            others = self._others.get(index)
            if others is None:
                yield UniqueQuestion(first, self._repeats[index], {first.answer: self._repeats[index]}, first.question)
                continue
            given = {first.answer: self._repeats[index] - sum(count for count, _ in others.values())}
            given |= {item.answer: count for count, item in others.values()}
            kept = {"drop": None, "first": first, "majority": _majority(first, given, others)}[rule]
            yield UniqueQuestion(kept, self._repeats[index], given, first.question)


def _majority(first: Question, given: dict[str, int], others: dict[str, tuple[int, Question]]) -> Question | None:
    items = {first.answer: first} | {item.answer: item for _, item in others.values()}
    answer, count = max(given.items(), key=lambda pair: pair[1])
    return items[answer] if 2 * count > sum(given.values()) else None


def _plain(answer: str) -> str:
    r"""Two answers are one if they differ only in spaces (`\,` too), `\dfrac12` for `\frac{1}{2}`, `\left(`, `$`, a
    last period."""
    plain = "".join(answer.split())
    if "\\" in answer:
        plain = _ANY_FRAC.sub(r"\\frac", "".join(_SPACE.sub("", answer).split()))
        plain = _FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", plain).replace("\\$", "")
    return plain.replace("$", "").removesuffix(".") or plain


def _hashed(answer: str) -> int:
    return int.from_bytes(blake2b(_plain(answer).encode(), digest_size=8).digest(), "big")


def _sound(text: str | None) -> str | None:
    return None if text is None else sound(text)


def _shown(answer: Any) -> Any:
    if isinstance(answer, str):
        return sound(answer)[-200:]
    return answer if answer is None or isinstance(answer, (bool, int, float)) else sound(str(answer))[-200:]
