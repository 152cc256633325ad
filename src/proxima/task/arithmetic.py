"""Made-up arithmetic: distinct questions, and held-out ones that were never trained on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from proxima.data import FieldError, require
from proxima.data.random import mix, permutation, share_of
from proxima.task.columns import template_fields
from proxima.task.protocol import Row, Rows

_ENUMERATED = 1 << 20  # pairs of operands up to which all are listed; beyond, pairs are drawn until enough are distinct
Question = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Questions such as "What is 17 + 4?", every one distinct, made from ranges of operands.

    A question is on the training or on the test side by a hash of itself, whatever the seed, the size and the template:
    a test question never occurs in training, nor does it with its operands exchanged (`+` and `*`). Use the same
    `held_out` on both sides. Operators take turns; one that has no question left is filled up by the others. Division
    is exact: a / b has the second operand b as divisor and a number of the first range as quotient.

    Args:
        operators: any of `+`, `-`, `*`, `/`.
        low: smallest first operand.
        high: largest first operand.
        second_low: smallest second operand; none: as the first's.
        second_high: largest second operand; none: as the first's.
        digits: operands have at most this many digits: sets `high`, and `second_high` where that is none, to 10^digits
            - 1; none: off.
        size: questions; >= 1.
        split: `train` or `test`, the side of the hash.
        held_out: share of all questions on the test side, in [0, 1).
        template: the question, with `{a}`, `{op}` and `{b}`.
    Returns: rows whose answer is the result as text; metadata `operator` and `operands`.
    Raises: ValueError when the ranges hold fewer questions than `size`; names both counts.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", tuple(self.operators))
        known = (
            bool(self.operators)
            and set(self.operators) <= set("+-*/")
            and len(set(self.operators)) == len(self.operators)
        )
        require(known, "operators", list(self.operators), "must hold one or more of '+', '-', '*', '/', each once")
        require(self.digits is None or 1 <= self.digits <= 18, "digits", self.digits, "must be in 1 … 18")
        require(self.size >= 1, "size", self.size, "must be >= 1")
        require(self.split in ("train", "test"), "split", self.split, "must be 'train' or 'test'")
        require(0 <= self.held_out < 1, "held_out", self.held_out, "must be in [0, 1)")
        require(
            self.split == "train" or self.held_out > 0,
            "held_out",
            self.held_out,
            "must be > 0 for split 'test': it is the test side's share",
        )
        fields = template_fields(self.template, "template")
        require(
            fields >= {"a", "b"} and fields <= {"a", "b", "op"},
            "template",
            self.template,
            "must hold {a} and {b}, and may hold {op}",
        )
        require(
            len(self.operators) == 1 or "op" in fields,
            "template",
            self.template,
            "must hold {op} where there are several operators",
        )
        for name, (low, high) in zip(("low", "second_low"), self.ranges, strict=True):
            require(low <= high, name, low, f"must be <= {name.replace('low', 'high')}={high}")

    @property
    def ranges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Smallest and largest value of the first and of the second operand."""
        high = self.high if self.digits is None else 10**self.digits - 1
        low = self.low if self.second_low is None else self.second_low
        return (self.low, high), (low, high if self.second_high is None else self.second_high)

    def rows(self, seed: int) -> Rows:
        """The questions; the seed decides which, not on which side."""
        questions = list(islice(_in_turns([self._questions(operator, seed) for operator in self.operators]), self.size))
        if len(questions) < self.size:
            (a, b), (c, d) = self.ranges
            available = (
                f"must be <= {len(questions)}, the number of distinct questions that operands {a}…{b} and {c}…{d} with "
                f"{' '.join(self.operators)} give on the {self.split} side (held_out={self.held_out:g})"
            )
            raise FieldError("size", self.size, available, remedy="widen the range or lower size")
        return ArithmeticRows(questions, self.template)

    def _questions(self, operator: str, seed: int) -> Iterator[Question]:
        """All questions of an operator on this side, distinct, in the order of the seed."""
        (low, high), (second_low, second_high) = self.ranges
        width = second_high - second_low + 1
        share = self.held_out if self.split == "test" else 1 - self.held_out
        for pair in _pairs((high - low + 1) * width, math.ceil(self.size / share), seed, ord(operator)):
            a, b = low + pair // width, second_low + pair % width
            if operator == "/":
                if b == 0:
                    continue
                a *= b
            if self._on_this_side(operator, a, b):
                yield operator, a, b

    def _on_this_side(self, operator: str, a: int, b: int) -> bool:
        first, second = (min(a, b), max(a, b)) if operator in "+*" else (a, b)
        return (share_of(f"{first} {operator} {second}") < self.held_out) == (self.split == "test")


def _pairs(space: int, wanted: int, seed: int, salt: int) -> Iterator[int]:
    """Distinct numbers of 0 … space-1 in random order: all of them where the space is small, else many more than
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


def _in_turns(sources: list[Iterator[Question]]) -> Iterator[Question]:
    while sources:
        for source in list(sources):
            question = next(source, None)
            if question is None:
                sources.remove(source)
            else:
                yield question


@dataclass(frozen=True)
class ArithmeticRows:
    """The questions of an `Arithmetic`, worded on access."""

    questions: list[Question]
    template: str

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Row:
        operator, a, b = self.questions[index]
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operator]
        question = self.template.format(a=a, op=operator, b=b)
        return Row(
            messages=({"role": "user", "content": question},),
            answer=str(result),
            metadata={"operator": operator, "operands": [a, b]},
        )
