"""Splits the rows of a task in two parts: rows to train on, and a share that is held out from training.

A hash of the question alone decides, with no seed: a row stays in its part when rows are added, removed or reordered,
and all rows with the same question are in the same part. `proxima data prepare` splits its questions by the same hash.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np

from proxima.data import FieldError, require
from proxima.data.errors import counted
from proxima.data.random import share_of
from proxima.task.protocol import EmptyPromptError, MappedRows, PlayedTask, Row, Rows, row_place, unusable_rows
from proxima.task.question_text import normalize

Part = Literal["train", "held_out"]
BY = "by a hash of the question"


def is_held_out(question: str, share: float) -> bool:
    """True for a share of the questions in [0, 1]. Questions that are equal after `normalize` give the same answer, and
    one that is held out stays so if the share grows."""
    return share_of(f"held out: {normalize(question)}") < share


def question_of(row: Row) -> str:
    """The text that decides a row's part.

    Of a single turn of the user it is the turn's text. Of a longer chat, or with images, it is JSON of the roles, the
    normalized texts and the hashes of the images. Of a chat that ends with the assistant, it is what precedes the first
    turn of the assistant: chats of one beginning are on one side, such as the two of a preference pair.
    """
    asked = list(row.messages)
    if asked and asked[-1]["role"] == "assistant":
        begun = [message["role"] for message in asked].index("assistant")
        asked = asked[: max(1, begun)]
    if len(asked) == 1 and asked[0]["role"] == "user" and not row.images:
        return str(asked[0]["content"])

    turns = [[message["role"], normalize(str(message["content"] or ""))] for message in asked]
    return json.dumps([turns, [image_sha(image) for image in row.images]], ensure_ascii=False)


def question_keys(rows: Rows, numbers: Iterable[int] | None = None) -> Iterator[bytes | None]:
    """Yield a hash of the question of each row, equal for questions that decide its part alike; None without a
    prompt.

    Args:
        numbers: the rows that are read; None: all.
    """
    if numbers is None:
        numbers = range(len(rows))
    for number in numbers:
        try:
            question = question_of(rows[number])
        except EmptyPromptError:
            yield None
        else:
            yield sha256(normalize(question).encode()).digest()


def image_sha(image: Any) -> str:
    """SHA-256 of an image of a row: of its file's bytes, or of its pixels."""
    if isinstance(image, bytes):
        data = image
    elif not isinstance(image, str):
        data = image.tobytes()
    elif Path(image).is_file():
        data = Path(image).read_bytes()
    else:
        data = image.encode()
    return sha256(data).hexdigest()


@dataclass(frozen=True, kw_only=True)
class SplitTask(PlayedTask):
    """Base of the kinds of tasks of which a share can be held out.

    Args:
        held_out: share of the questions, in (0, 1), that is held out from training, by a hash of the question;
            `eval.task` left out evaluates it. null: none.
        part: the rows, if `held_out` is set: `train`, those to train on, or `held_out`.
    """

    held_out: float | None = None
    part: Part = "train"

    def __post_init__(self) -> None:
        possible = self.held_out is None or 0 < self.held_out < 1
        remedy = "null holds nothing out"
        require(possible, "held_out", self.held_out, "must be a share in (0, 1)", remedy=remedy)
        require(self.part in ("train", "held_out"), "part", self.part, "must be 'train' or 'held_out'")
        splits = self.held_out is not None or self.part == "train"
        remedy = "set held_out to its share, such as 0.1"
        require(splits, "part", self.part, "needs a part that is held out", remedy=remedy)

    def all_rows(self, seed: int) -> Rows:
        """Open the rows of both parts; see `Task.rows`."""
        raise NotImplementedError

    def rows(self, seed: int) -> Rows:
        """Open the rows of `part`, in the order of the data; the seed is ignored.

        Raises:
            UserError: as `all_rows`. FieldError: the part has no rows.
        """
        return self.of_part(self.all_rows(seed))

    def of_part(self, rows: Rows) -> Rows:
        """Choose the rows of `part` from all rows."""
        if self.held_out is None:
            return rows
        return rows_of_part(rows, self.held_out, self.part)

    def shares_data(self, other: object) -> bool:
        """True if `all_rows` of another task are the same."""
        if type(other) is not type(self):
            return False

        return self == replace(other, held_out=self.held_out, part=self.part)


def rows_of_part(rows: Rows, held_out: float, part: Part) -> MappedRows:
    """The rows of one part, in their order. A row without a prompt is in the part `train`.

    Raises:
        FieldError: the part has no rows.
    """
    trained: list[int] = []
    held: list[int] = []
    for number in range(len(rows)):
        if _is_held(rows, number, held_out):
            held.append(number)
        else:
            trained.append(number)
    of_all = counted(len(rows), "row")

    if part == "held_out":
        if not held:
            bound = f"leaves none of the {of_all} in the held-out part"
            raise FieldError("held_out", held_out, bound, remedy="raise it, or add rows")
        return _chosen(rows, held, (), f"{len(held):,} of {of_all}, held out {BY}")

    if not trained:
        bound = f"leaves none of the {of_all} in the part to train on"
        raise FieldError("held_out", held_out, bound, remedy="lower it, or add rows")
    verb = "is" if len(held) == 1 else "are"
    about = f"{len(trained):,} of {of_all}; {len(held):,} {verb} held out {BY}"
    left = _chosen(rows, held, (), "")
    return replace(_chosen(rows, trained, unusable_rows(rows), about), left_out=(left,))


def _is_held(rows: Rows, number: int, share: float) -> bool:
    """True for a row that is held out; a row without a prompt never is."""
    try:
        return is_held_out(question_of(rows[number]), share)
    except EmptyPromptError:
        return False


SHARES = {200: 0.1, 40: 0.2, 0: 0.3}  # rows from which such a share of them is held out
READ = 1_000  # first rows, of which each part has some if the share is possible


def usual_share(count: int) -> float:
    """The share to hold out of so many rows."""
    return next(share for least, share in SHARES.items() if count >= least)


def possible_share(rows: Rows) -> float | None:
    """The `usual_share` of the rows; None: they have so few questions that one part would be empty."""
    share = usual_share(len(rows))
    sides = set()
    for number in range(min(READ, len(rows))):
        try:
            question = question_of(rows[number])
        except EmptyPromptError:
            continue
        sides.add(is_held_out(question, share))
    return share if len(sides) == 2 else None


def _chosen(rows: Rows, numbers: Sequence[int], unusable: tuple[EmptyPromptError, ...], about: str) -> MappedRows:
    """The rows with these numbers, which keep their places in errors."""

    def row(_: int, number: int) -> Row:
        return rows[int(number)]

    def place(number: int) -> str:
        return row_place(rows, int(number))

    return MappedRows(np.asarray(numbers, np.int64), row, unusable, place, about)
