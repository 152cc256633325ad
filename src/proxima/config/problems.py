"""Problems of a config, one line each: path, value, origin and remedy; and bounds that several sections check."""

import glob
import os
import re
import shlex
from collections.abc import Iterable, Iterator
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
        shown = ""
        if self.value is not None:
            shown = f"={abbreviated(without_secrets(self.value), LONGEST_VALUE)}"
        where = "" if self.source is None else f" ({self.source})"
        said = f"{abbreviated(self.path, LONGEST_VALUE)}{shown}{where}: {abbreviated(self.message, LONGEST_LINE)}"
        beside = beside_its_recipe(self.value or "", self.source or "")
        return f"{said}; {beside}" if beside else said


def beside_its_recipe(value: str, source: str) -> str:
    """What to do about a path that leads nowhere from the current folder but somewhere from its recipe's; empty if the
    value is none.

    Args:
        value: a path, a pattern, `FILE.py:FUNCTION` or `package.module:NAME`.
        source: `FILE:LINE`, where it was written.
    """
    recipe = re.sub(r":\d+(, .*)?$", "", source)
    folder = os.path.dirname(recipe)
    if not folder or not os.path.isfile(recipe) or os.path.isabs(value) or value.startswith("~"):
        return ""
    for path in _files_named(value):
        there = os.path.normpath(os.path.join(folder, path))
        if not _exists(path) and _exists(there):
            return f"there is {there}: cd {shlex.quote(folder)} first, or write a path from the current folder"
    return ""


def _files_named(value: str) -> Iterator[str]:
    """The files that a value can name."""
    yield value
    module, colon, _ = value.rpartition(":")
    if colon and module.endswith(".py"):
        yield module
    elif colon and re.fullmatch(r"\w+(\.\w+)*", module):
        yield f"{module.replace('.', os.sep)}.py"


def _exists(path: str) -> bool:
    if "\0" in path:
        return False
    if glob.has_magic(path):
        return bool(glob.glob(path))
    return os.path.exists(path)


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
