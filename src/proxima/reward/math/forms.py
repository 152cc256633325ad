r"""The normal forms of an answer. A row's answer is parsed into one of them, and `answer_rules` says what equals it."""

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
class WordAnswer:
    """WordAnswer in lower case, without typesetting, with single spaces."""

    text: str


@dataclass(frozen=True)
class SolutionInterval:
    r"""The values from `low` to `high`, in LaTeX; None: without an end. `closed`: which ends belong to it."""

    low: str | None = None
    high: str | None = None
    closed: tuple[bool, bool] = (False, False)

    @property
    def latex(self) -> str:
        """`[2,5)`; the ends that are None as infinity."""
        left = "[" if self.closed[0] and self.low else "("
        right = "]" if self.closed[1] and self.high else ")"
        low = self.low or r"-\infty"
        high = self.high or r"\infty"
        return f"{left}{low},{high}{right}"


@dataclass(frozen=True)
class Solutions:
    """The values of an unknown for which inequalities hold: all in the intervals, without the excluded ones."""

    unknown: str
    intervals: tuple[SolutionInterval, ...]
    excluded: tuple[str, ...] = ()

    @property
    def latex(self) -> str:
        r"""The union of the intervals, without the excluded values: `(-\infty,\infty)\setminus\{1,2\}`."""
        union = r"\cup".join(interval.latex for interval in self.intervals)
        return rf"{union}\setminus\{{{','.join(self.excluded)}\}}" if self.excluded else union
