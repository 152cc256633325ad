"""Generated tasks: questions of arithmetic, images of squares to count, and seeds for worlds that write the prompt."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from operator import add, floordiv, mul, sub
from typing import Any, ClassVar, Literal

from proxima.data import FieldError, require
from proxima.data.random import mix, permutation, share_of
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, user_message
from proxima.task.template import template_fields

_ENUMERATED = 1 << 20  # up to this many pairs of operands, all are listed; beyond, distinct pairs are drawn
Question = tuple[str, int, int]
RESULTS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "/": floordiv}
SLIPS = (-10, -2, -1, 1, 2, 10)  # errors of a rejected answer: a forgotten carry, a miscounted step


@dataclass(frozen=True, kw_only=True)
class Arithmetic(PlayedTask):
    """Distinct questions such as "What is 17 + 4?", generated from ranges of operands.

    A hash of the operands and the operator decides the split of a question, whatever the seed, the size and the
    template: a test question never occurs in training, not even with its operands exchanged (`+` and `*`). Use the same
    `held_out` for both splits. Operators alternate; when one runs out of questions, the others continue. Division is
    exact: the divisor is from the second range, the quotient from the first.

    Args:
        operators: any of `+`, `-`, `*`, `/`.
        low: smallest first operand.
        high: largest first operand.
        second_low: smallest second operand; null: that of the first.
        second_high: largest second operand; null: that of the first.
        digits: sets `high`, and `second_high` if it is null, to 10^digits - 1; null: off.
        size: number of questions; >= 1.
        split: `train` or `test`.
        held_out: share of all questions in the test split, in [0, 1).
        template: the question, with `{a}`, `{op}` and `{b}`.
        pairs: add to the metadata `chosen`, the result, and `rejected`, a number near it, for reward models and DPO.
    Returns: rows whose answer is the result as text; metadata `operator` and `operands`.
    Raises: FieldError if the ranges give fewer questions than `size`; it names both counts.
    """

    operators: tuple[str, ...] = ("+",)
    low: int = 1
    high: int = 20
    second_low: int | None = None
    second_high: int | None = None
    digits: int | None = None
    size: int = 1000
    split: Literal["train", "test"] = "train"
    held_out: float = 0.2
    template: str = "What is {a} {op} {b}?"
    pairs: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", tuple(self.operators))
        known = bool(self.operators) and set(self.operators) <= set("+-*/")
        once = len(set(self.operators)) == len(self.operators)
        bound = "must hold one or more of '+', '-', '*', '/', each once"
        require(known and once, "operators", list(self.operators), bound)
        require(self.digits is None or 1 <= self.digits <= 18, "digits", self.digits, "must be in 1 … 18")
        require(self.size >= 1, "size", self.size, "must be >= 1")
        require(self.split in ("train", "test"), "split", self.split, "must be 'train' or 'test'")
        require(0 <= self.held_out < 1, "held_out", self.held_out, "must be in [0, 1)")
        fits = self.split == "train" or self.held_out > 0
        require(fits, "held_out", self.held_out, "must be > 0 for split 'test': it is the test side's share")
        fields = template_fields(self.template, "template")
        fits = fields >= {"a", "b"} and fields <= {"a", "b", "op"}
        require(fits, "template", self.template, "must hold {a} and {b}, and may hold {op}")
        fits = len(self.operators) == 1 or "op" in fields
        require(fits, "template", self.template, "must hold {op} where there are several operators")
        for name, (low, high) in zip(("low", "second_low"), self.ranges, strict=True):
            require(low <= high, name, low, f"must be <= {name.replace('low', 'high')}={high}")

    @property
    def ranges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Smallest and largest value of the first and of the second operand."""
        low = self.low
        high = self.high if self.digits is None else 10**self.digits - 1
        second_low = low if self.second_low is None else self.second_low
        second_high = high if self.second_high is None else self.second_high
        return (low, high), (second_low, second_high)

    def rows(self, seed: int) -> Rows:
        """Return the questions; the seed selects them, but does not affect their split."""
        questions = list(islice(self._alternating(seed), self.size))
        if len(questions) < self.size:
            (a, b), (c, d) = self.ranges
            operands = f"operands {a}…{b} and {c}…{d} with {' '.join(self.operators)}"
            available = f"must be <= {len(questions)}, the number of distinct questions that {operands} give on the "
            side = f"{self.split} side (held_out={self.held_out:g})"
            raise FieldError("size", self.size, available + side, remedy="widen the range or lower size")
        return MappedRows(questions, self._row)

    def _row(self, index: int, question: Question) -> Row:
        operator, a, b = question
        result = RESULTS[operator](a, b)
        messages = user_message(self.template.format(a=a, op=operator, b=b))
        metadata = {"operator": operator, "operands": [a, b]}
        if self.pairs:
            slip = SLIPS[mix(ord(operator), a, b) % len(SLIPS)]
            metadata |= {"chosen": str(result), "rejected": str(result + slip)}
        return Row(messages=messages, answer=str(result), metadata=metadata)

    def _alternating(self, seed: int) -> Iterator[Question]:
        """Yield a question of each operator in turn, as long as it has one."""
        of_operators = [self._questions(operator, seed) for operator in self.operators]
        for turn in zip_longest(*of_operators):
            for question in turn:
                if question is not None:
                    yield question

    def _questions(self, operator: str, seed: int) -> Iterator[Question]:
        """Yield all distinct questions of an operator in this split, in the order given by the seed."""
        (low, high), (second_low, second_high) = self.ranges
        width = second_high - second_low + 1
        share = self.held_out if self.split == "test" else 1 - self.held_out
        wanted = math.ceil(self.size / share)
        for pair in _pairs((high - low + 1) * width, wanted, seed, ord(operator)):
            a = low + pair // width
            b = second_low + pair % width
            if operator == "/":
                if b == 0:
                    continue
                a *= b
            if self._in_split(operator, a, b):
                yield operator, a, b

    def _in_split(self, operator: str, a: int, b: int) -> bool:
        if operator in "+*" and a > b:
            a, b = b, a
        held_out = share_of(f"{a} {operator} {b}") < self.held_out
        return held_out == (self.split == "test")


def _pairs(space: int, wanted: int, seed: int, salt: int) -> Iterator[int]:
    """Yield distinct numbers of 0 … space-1 in random order: all of a small space, far more than `wanted` of a large
    one."""
    if space <= max(_ENUMERATED, 4 * wanted):
        yield from (int(pair) for pair in permutation(space, seed, salt))
        return
    seen: set[int] = set()
    for counter in range(64 * wanted):
        pair = mix(seed, salt, counter) % space
        if pair not in seen:
            seen.add(pair)
            yield pair


@dataclass(frozen=True, kw_only=True)
class Seeds(PlayedTask):
    """Rows with nothing but a number, for an environment whose `reset` writes the prompt from its seed.

    Args:
        count: number of rows; >= 1.
    Returns: rows with an empty message; metadata `number`, from 0.
    """

    count: int = 1000

    def __post_init__(self) -> None:
        require(self.count >= 1, "count", self.count, "must be >= 1")
        remedy = "name an environment that writes the prompt in `reset`, or another task"
        require(self.environment is not None, "environment", None, "must be set: the rows have no text", remedy=remedy)

    def rows(self, seed: int) -> Rows:
        """Return the numbered rows; each draw of a row has its own seed, in every epoch."""
        return MappedRows(
            range(self.count), lambda number, _: Row(messages=user_message(""), metadata={"number": number})
        )


CELL = 8  # pixels of a cell, which a square does not fill


@dataclass(frozen=True, kw_only=True)
class Shapes(PlayedTask):
    """Random images of `side` x `side` cells of 8 pixels, 1 to `most` of which contain a coloured square.

    Args:
        most: most squares; 1 to 9.
        side: cells of a row; 2 to 16.
        size: number of images.
        split: `train` or `test`, which draw different images.
        shuffled: each question shows the image of another one: a control, in which only the frequencies of the answers
            can be learned.
        template: the question.
    Returns: rows whose answer is the number of squares as text.
    """

    images: ClassVar[bool] = True

    most: int = 4
    side: int = 4
    size: int = 1000
    split: Literal["train", "test"] = "train"
    shuffled: bool = False
    template: str = "How many?"

    def __post_init__(self) -> None:
        require(2 <= self.side <= 16, "side", self.side, "must be in 2 … 16")
        require(1 <= self.most <= min(9, self.side**2), "most", self.most, "must be in 1 … 9, and in the cells")
        require(self.size >= 1, "size", self.size, "must be >= 1")
        require(self.split in ("train", "test"), "split", self.split, "must be 'train' or 'test'")

    def rows(self, seed: int) -> Rows:
        """Return the questions; the seed draws the images."""
        return MappedRows(range(self.size), lambda number, _: self._row(seed, number))

    def _row(self, seed: int, number: int) -> Row:
        if self.shuffled:
            shown = (number + 1) % self.size
        else:
            shown = number
        key = mix(seed, int(self.split == "test"))
        count, _ = self._drawn(key, number)
        return Row(messages=user_message(self.template), answer=str(count), images=(self._image(key, shown),))

    def _drawn(self, key: int, number: int) -> tuple[int, list[int]]:
        """The number of squares, and their cells."""
        cells = sorted(range(self.side**2), key=lambda cell: mix(key, number, cell))
        count = 1 + mix(key, number, -1) % self.most
        return count, cells[:count]

    def _image(self, key: int, number: int) -> Any:
        """The image, as PIL has it."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (self.side * CELL, self.side * CELL), "black")
        draw = ImageDraw.Draw(image)
        for cell in self._drawn(key, number)[1]:
            draws = [mix(key, number, cell, part) for part in range(6)]
            row, column = divmod(cell, self.side)
            left = column * CELL + draws[0] % 3
            top = row * CELL + draws[1] % 3
            size = 4 + draws[2] % 2
            colour = tuple(100 + draw % 156 for draw in draws[3:])
            draw.rectangle((left, top, left + size, top + size), fill=colour)
        return image
