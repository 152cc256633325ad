r"""The normal forms of an answer. A row's answer is parsed into one of them, and `compare` says what equals it."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class WrittenNumber:
    """A number as written.

    Args:
        value: the exact value.
        places: decimal places written; none: an integer or a fraction.
        percent: a percent sign follows.
        name: name of the quantity, such as `x` in `x = 5`; none: unnamed.
        finished: False for a fraction with an integer value, such as 122/2: an unfinished division.
    """

    value: Fraction
    places: int | None = None
    percent: bool = False
    name: str | None = None
    finished: bool = True


@dataclass(frozen=True)
class Choice:
    """The letter of an option, in upper case, and what the option says, where the row's answer has both.

    Args:
        bare: the letter has no brackets, and no `)`, `.` or `:` behind it: it may be a variable.
    """

    letter: str
    value: str | None = None
    bare: bool = False


@dataclass(frozen=True)
class Words:
    """Words in lower case, without typesetting, with single spaces."""

    text: str


@dataclass(frozen=True)
class Solutions:
    r"""The values of an unknown, as intervals in LaTeX: `[2,5]`, `(-\infty,2]\cup[3,\infty)`.

    Args:
        unknown: the letter; empty for a set without one.
    """

    unknown: str
    values: str
