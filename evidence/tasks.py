"""Generated tasks whose solutions are written out step by step, so that their length is chosen and errors compound.

    chain sums    a3b5c9           a303b508c917=17    the running total after each term, mod 100
    countdown     3,7,2>20         3+7=10;10*2=20     two operations that use each number once and make the target
    programs      a=3;b=7;c=a+b    a3b7c0=0           the value of each line, mod 10; the last one is the answer

A recipe names them as `evidence.tasks:ChainSums`; the metadata of a row has its `solution`, the answer is what a reward
compares. A hash of the question decides its split, whatever seed and size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any, Literal

from proxima.data import require
from proxima.data.random import mix, share_of
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, user_message

# One character a term: Latin, Greek and Cyrillic letters, each a token of its own.
LABELS = "".join(map(chr, [*range(97, 123), *range(65, 91), *range(0x3B1, 0x3C2), *range(0x3C3, 0x3CA)]))
LABELS += "".join(map(chr, range(0x430, 0x450)))
Draw = Callable[[int, int], int]  # (index of the draw, its exclusive limit)


@dataclass(frozen=True, kw_only=True)
class _Generated(PlayedTask):
    """Distinct generated questions.

    Args:
        size: number of questions; >= 1.
        split: `train` or `test`.
        held_out: share of all questions in the test split, in (0, 1).
    """

    size: int = 10_000
    split: Literal["train", "test"] = "train"
    held_out: float = 0.1

    def __post_init__(self) -> None:
        require(self.size >= 1, "size", self.size, "must be >= 1")
        require(self.split in ("train", "test"), "split", self.split, "must be 'train' or 'test'")
        require(0 < self.held_out < 1, "held_out", self.held_out, "must be in (0, 1)")

    def question(self, number: int, draw: Draw) -> tuple[str, str, Any]:
        """The text of a question, its solution and its answer."""
        raise NotImplementedError

    def rows(self, seed: int) -> Rows:
        """Return the first `size` distinct questions of the split; the seed selects them."""
        made = list(islice(self._distinct(seed), self.size))
        require(
            len(made) == self.size, "size", self.size, f"must be <= {len(made)}, the distinct questions of the split"
        )
        return MappedRows(made, _row)

    def _distinct(self, seed: int) -> Iterator[tuple[str, str, Any]]:
        seen: set[str] = set()
        for number in range(64 * self.size):
            made = self.question(number, partial(_draw, seed, number))
            held_out = share_of(made[0]) < self.held_out
            if made[0] not in seen and held_out == (self.split == "test"):
                seen.add(made[0])
                yield made


def _counts(field: str, numbers: tuple[int, ...], *, least: int) -> tuple[int, ...]:
    """The checked numbers of lines or terms, each of which has a letter."""
    fits = bool(numbers) and all(least <= n <= len(LABELS) for n in numbers)
    require(fits, field, list(numbers), f"must be numbers in {least} … {len(LABELS)}")
    return tuple(numbers)


def _draw(seed: int, number: int, index: int, limit: int) -> int:
    return mix(seed, number, index) % limit


def _row(_index: int, made: tuple[str, str, Any]) -> Row:
    question, solution, answer = made
    return Row(messages=user_message(question), answer=answer, metadata={"solution": solution})


@dataclass(frozen=True, kw_only=True)
class ChainSums(_Generated):
    """Sums of digits, each with a letter, whose running total is written after each term, mod 100. The letters follow
    the alphabet of `LABELS` from a random one on.

    A solution has four tokens a term, four more for `=17` and the end: 3, 15, 49 and 99 terms make 16, 64, 200 and 400.

    Args:
        terms: numbers of terms, in 1 … 108, which take turns.
    """

    terms: tuple[int, ...] = (15,)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "terms", _counts("terms", self.terms, least=1))

    def question(self, number: int, draw: Draw) -> tuple[str, str, Any]:
        terms = self.terms[number % len(self.terms)]
        first = draw(terms, len(LABELS) - terms + 1)
        total, question, steps = 0, "", ""
        for index, label in enumerate(LABELS[first : first + terms]):
            digit = draw(index, 10)
            total = (total + digit) % 100
            question += f"{label}{digit}"
            steps += f"{label}{digit}{total:02d}"
        return question, f"{steps}={total:02d}", f"{total:02d}"


@dataclass(frozen=True, kw_only=True)
class Countdown(_Generated):
    """Three numbers in 1 … 12 and a target that two of `+`, `-`, `*` make of them, each number used once.

    The solution is one of those that a search finds; any other is right too (`countdown_reward`).
    """

    def question(self, number: int, draw: Draw) -> tuple[str, str, Any]:
        numbers = tuple(1 + draw(index, 12) for index in range(3))
        targets = countdown_solutions(numbers)
        target = sorted(targets)[draw(3, len(targets))]
        solutions = targets[target]
        question = f"{','.join(map(str, numbers))}>{target}"
        return question, solutions[draw(4, len(solutions))], question


@cache
def countdown_solutions(numbers: tuple[int, ...]) -> dict[int, list[str]]:
    """All solutions of three numbers, by target >= 0: the whole space, which a test or an experiment can enumerate."""
    found: dict[int, list[str]] = {}
    for first in range(3):
        for second in range(3):
            if first == second:
                continue
            (third,) = set(range(3)) - {first, second}
            for step, value in _operations(numbers[first], numbers[second]):
                for pair in ((value, numbers[third]), (numbers[third], value)):
                    for last, target in _operations(*pair):
                        found.setdefault(target, []).append(f"{step};{last}")
    return {target: sorted(set(texts)) for target, texts in found.items()}


def _operations(a: int, b: int) -> list[tuple[str, int]]:
    results = {"+": a + b, "*": a * b} | ({"-": a - b} if a >= b else {})
    return [(f"{a}{sign}{b}={value}", value) for sign, value in results.items()]


def countdown_reward(completion: str, answer: str) -> float:
    """1 if the completion is a solution of the question, else 0: a reward of the kind `function`."""
    numbers, _, target = answer.partition(">")
    return float(completion in countdown_solutions(tuple(map(int, numbers.split(",")))).get(int(target), ()))


@dataclass(frozen=True, kw_only=True)
class Programs(_Generated):
    """Straight-line programs over digits: each line sets a new variable to a digit, or to the sum or difference of two
    earlier ones mod 10; the solution is the value of each line.

    Args:
        lines: numbers of lines, in 3 … 108, which take turns; a solution has two tokens a line and three more.
    """

    lines: tuple[int, ...] = (20,)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "lines", _counts("lines", self.lines, least=3))

    def question(self, number: int, draw: Draw) -> tuple[str, str, Any]:
        values: list[int] = []
        lines, trace = [], []
        for index in range(self.lines[number % len(self.lines)]):
            digit, sign = draw(4 * index, 10), "+-"[draw(4 * index + 1, 2)]
            if index < 2:
                values.append(digit)
                lines.append(f"{LABELS[index]}={digit}")
            else:
                a, b = draw(4 * index + 2, index), draw(4 * index + 3, index)
                values.append((values[a] + values[b] * (1 if sign == "+" else -1)) % 10)
                lines.append(f"{LABELS[index]}={LABELS[a]}{sign}{LABELS[b]}")
            trace.append(f"{LABELS[index]}{values[-1]}")
        return ";".join(lines), f"{''.join(trace)}={values[-1]}", str(values[-1])
