"""Problems of a config, one line each: path, value, origin and remedy."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from proxima.data.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One line of a `ConfigError`: `path=value (source): message`.

    Args:
        path: the dotted path of the field, or a file.
        message: what is wrong and what to do about it.
        value: the value as the user would write it; None where there is none (a missing field).
        source: where the value came from: `command line`, `FILE:LINE`, `preset cppo`, `default`.
    """

    path: str
    message: str
    value: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        shown = "" if self.value is None else f"={self.value}"
        where = "" if self.source is None else f" ({self.source})"
        return f"{self.path}{shown}{where}: {self.message}"


class ConfigError(UserError):
    """Everything that is wrong with a config, found in one go; `str()` has one line a problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def one_problem(path: str, message: str, value: str | None = None, source: str | None = None) -> ConfigError:
    """A `ConfigError` of one line."""
    return ConfigError([Problem(path, message, value, source)])


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is probably a typo of; None if none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=5, cutoff=0.6)
    return min(near, key=lambda other: sorted(other) != sorted(name), default=None)  # gpro is grpo, not gspo


def suggestion(name: str, known: Iterable[str], also: str = "") -> str:
    """`did you mean 'delta'?`, or, when nothing is near, `known: delta, delta_b, w_min, or `, and the form `also`."""
    names = sorted(known)
    if (near := nearest(name, names)) is not None:
        return f"did you mean {near!r}?"
    if not names:
        return f"there are none{', only ' + also if also else ''}"
    return "known: " + ", ".join(names) + (f", or {also}" if also else "")
