"""Generated arithmetic: distinct questions, and held-out ones that training never sees."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Literal

from proxima.data import FieldError, require
from proxima.data.random import mix, permutation, share_of
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, user_message
from proxima.task.template import template_fields

_ENUMERATED = 1 << 20  # up to this many pairs of operands, all are listed; beyond, distinct pairs are drawn
Question = tuple[str, int, int]
SLIPS = (-10, -2, -1, 1, 2, 10)  # errors of a rejected answer: a forgotten carry, a miscounted step


@dataclass(frozen=True, kw_only=True)
class Arithmetic(PlayedTask):
    """Distinct questions such as "What is 17 + 4?", generated from ranges of operands.

    A hash of the question decides its split, whatever the seed, the size and the template: a test question never occurs
    in training, not even with its operands exchanged (`+` and `*`). Use the same `held_out` for both splits. Operators
    take turns; when one runs out of questions, the others continue. Division is exact: a / b has the second operand b
    as divisor and a number of the first range as quotient.

    Args:
        operators: any of `+`, `-`, `*`, `/`.
        low: smallest first operand.
        high: largest first operand.
        second_low: smallest second operand; null: that of the first.
        second_high: largest second operand; null: that of the first.
        digits: operands have at most this many digits: sets `high`, and `second_high` if it is null, to 10^digits
            - 1; null: off.
        size: number of questions; >= 1.
        split: `train` or `test`.
        held_out: share of all questions in the test split, in [0, 1).
        template: the question, with `{a}`, `{op}` and `{b}`.
        pairs: the metadata also has `chosen`, the result, and `rejected`, a number near it: for reward models and DPO.
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
        once = bool(self.operators) and set(self.operators) <= set("+-*/")
        once = once and len(set(self.operators)) == len(self.operators)
        require(once, "operators", list(self.operators), "must hold one or more of '+', '-', '*', '/', each once")
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
        high = self.high if self.digits is None else 10**self.digits - 1
        low = self.low if self.second_low is None else self.second_low
        return (self.low, high), (low, high if self.second_high is None else self.second_high)

    def rows(self, seed: int) -> Rows:
        """Return the questions; the seed selects them, but does not affect their split."""
        turns = zip_longest(*(self._questions(operator, seed) for operator in self.operators))
        questions = list(islice((question for turn in turns for question in turn if question), self.size))
        if len(questions) < self.size:
            (a, b), (c, d) = self.ranges
            given = f"operands {a}…{b} and {c}…{d} with {' '.join(self.operators)}"
            available = f"must be <= {len(questions)}, the number of distinct questions that {given} give on the "
            side = f"{self.split} side (held_out={self.held_out:g})"
            raise FieldError("size", self.size, available + side, remedy="widen the range or lower size")
        return MappedRows(questions, self._row)

    def _row(self, index: int, question: Question) -> Row:
        operator, a, b = question
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operator]
        messages = user_message(self.template.format(a=a, op=operator, b=b))
        metadata = {"operator": operator, "operands": [a, b]}
        if self.pairs:
            slip = SLIPS[mix(ord(operator), a, b) % len(SLIPS)]
            metadata |= {"chosen": str(result), "rejected": str(result + slip)}
        return Row(messages=messages, answer=str(result), metadata=metadata)

    def _questions(self, operator: str, seed: int) -> Iterator[Question]:
        """Yield all distinct questions of an operator in this split, in the order given by the seed."""
        (low, high), (second_low, second_high) = self.ranges
        width = second_high - second_low + 1
        share = self.held_out if self.split == "test" else 1 - self.held_out
        for pair in _pairs((high - low + 1) * width, math.ceil(self.size / share), seed, ord(operator)):
            a, b = low + pair // width, second_low + pair % width
            if operator == "/":
                a *= b
            if (operator != "/" or b != 0) and self._in_split(operator, a, b):
                yield operator, a, b

    def _in_split(self, operator: str, a: int, b: int) -> bool:
        first, second = (min(a, b), max(a, b)) if operator in "+*" else (a, b)
        return (share_of(f"{first} {operator} {second}") < self.held_out) == (self.split == "test")


def _pairs(space: int, wanted: int, seed: int, salt: int) -> Iterator[int]:
    """Yield distinct numbers of 0 … space-1 in random order: all of a small space, from a large one many more than
    wanted."""
    if space <= max(_ENUMERATED, 4 * wanted):
        yield from (int(pair) for pair in permutation(space, seed, salt))
        return
    seen: set[int] = set()
    for counter in range(64 * wanted):
        pair = mix(seed, salt, counter) % space
        if pair not in seen:
            seen.add(pair)
            yield pair
