r"""The normal forms of an answer. An answer is parsed into one of them, and `compare` says when two are the same."""

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
