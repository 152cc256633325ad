"""Problems of a config, one line each: path, value, origin and remedy; and bounds that several sections check."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from proxima.data import require
from proxima.data.errors import LONGEST_LINE, LONGEST_VALUE, UserError, abbreviated
from proxima.system.secret_values import without_secrets


@dataclass(frozen=True)
class Problem:
    """One line of a `ConfigError`: `path=value (source): message`.

    Args:
        path: the dotted path of the field, or a file.
        message: what is wrong and what to do about it.
        value: the value as the user would write it; None for a missing field.
        source: where the value came from: `command line`, `FILE:LINE`, `preset cppo`, `default`.
    """

    path: str
    message: str
    value: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        shown = "" if self.value is None else f"={abbreviated(without_secrets(self.value), LONGEST_VALUE)}"
        where = "" if self.source is None else f" ({self.source})"
        return f"{abbreviated(self.path, LONGEST_VALUE)}{shown}{where}: {abbreviated(self.message, LONGEST_LINE)}"


class ConfigError(UserError):
    """All problems of a config, reported together; `str()` has one line per problem. A value that is taken from another
    field has none of its own where the same is wrong with the other.

    Args:
        problems: in the order of the schema.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        every = tuple(problems)
        named = {(f"as {problem.path}", problem.message) for problem in every}
        self.problems = tuple(problem for problem in every if (problem.source, problem.message) not in named)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def one_problem(path: str, message: str, value: str | None = None, source: str | None = None) -> ConfigError:
    """A `ConfigError` with a single problem."""
    return ConfigError([Problem(path, message, value, source)])


def require_at_least(config: Any, minimum: int, *fields: str, remedy: str = "") -> None:
    """Raise `FieldError` for the first of the fields that is below the minimum."""
    for name in fields:
        value = getattr(config, name)
        require(value >= minimum, name, value, f"must be >= {minimum}", remedy=remedy)


def require_plain_folder(folder: str | None) -> None:
    """Raise `FieldError` for a folder name with control characters."""
    plain = folder is None or folder.isprintable()
    require(plain, "folder", folder, "must not have control characters, which a terminal obeys")
