"""A config in which every value knows where it was written."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from proxima.config.describe import FieldInfo, summary_of
from proxima.config.problems import ConfigError, Problem
from proxima.config.scalars import for_any_reader, in_one_line, to_json
from proxima.config.tree import is_index
from proxima.data.errors import FieldError, FieldErrors
from proxima.system.secret_values import HIDDEN
from proxima.system.user_files import shown_path

Root = TypeVar("Root", covariant=True)
Findings = Iterator[tuple[str, str] | Problem]  # of a check: the path of a field, and what is wrong with its value


@dataclass(frozen=True)
class ResolvedValue:
    """One line of `explain`.

    Args:
        path: dotted path of a leaf, `algorithm.surrogate.delta`, or of a slot's `kind`.
        value: a scalar, list or dict, as in JSON.
        source: where it was written, `command line, over 0.15 of the preset`; `where` is the part before `, over`.
        of: the field, or the class of a slot's `kind`.
        origin: `file`, `command line`, `preset` or `default`.
        is_default: it is the value of a recipe that does not set the field.
    """

    path: str
    value: Any
    source: str
    of: FieldInfo | type
    origin: str
    where: str
    is_default: bool = False

    @property
    def help(self) -> str:
        """Meaning and unit of the field, or the first sentence about the class."""
        if isinstance(self.of, type):
            return summary_of(self.of)
        return self.of.help


@dataclass(frozen=True)
class Resolved(Generic[Root]):
    """A config and where each of its values was written.

    Args:
        config: every slot holds its spec.
        entries: all leaves in the order of the schema.
        recipe: the path or name of the recipe; None for a config built from a mapping.
        import_code: the code outside proxima that it names was imported.
    """

    config: Root
    entries: tuple[ResolvedValue, ...]
    recipe: str | None = None
    import_code: bool = True

    def entry(self, path: str) -> ResolvedValue:
        """The entry at a path, or the first below a slot or section (its kind); KeyError if there is none."""
        for entry in self.entries:
            if f"{entry.path}.".startswith(f"{path}."):
                return entry
        raise KeyError(path)

    def get(self, path: str) -> Any:
        """The section, spec or value at a dotted path; None if the command's config lacks the section."""
        value: Any = self.config
        for name in path.split("."):
            value = getattr(value, name, None)
        return value

    def problem(self, path: str, message: str) -> Problem:
        """A problem with the value at `path`, with its value and source."""
        entry = self.entry(path)
        return Problem(entry.path, message, in_one_line(entry.value), entry.where)

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Turn a `FieldError` whose field is a path of this config into a `ConfigError` with the value's origin.

        `with resolved.locating(), within("task"): rows = config.task.rows(seed)`. Other errors pass unchanged.
        """
        try:
            yield
        except (FieldError, FieldErrors) as raised:
            errors = raised.errors if isinstance(raised, FieldErrors) else (raised,)
            problems = list[Problem]()
            for error in errors:
                problem = self._problem_of(error)
                if problem is None:
                    raise
                problems.append(problem)
            raise ConfigError(problems) from raised

    def _problem_of(self, error: FieldError) -> Problem | None:
        """The problem of an error; None if its field is not a path of this config."""
        at = next((entry for entry in self.entries if f"{error.field}.".startswith(f"{entry.path}.")), None)
        if at is None:
            return None
        value = to_json(error.value)
        if at.path == error.field and error.value != HIDDEN:
            value = at.value
        return Problem(error.field, " ".join(error.requirement.split()), in_one_line(value), at.where)


Lines = list[tuple[str, str | None]]  # each with the comment that follows it


def dump(resolved: Resolved[Any], earlier: Path | None = None) -> str:
    """YAML text that `resolve` turns into a config equal to `resolved.config`; comments say where values came from.

    Args:
        earlier: a file that this wrote before, if there is one: a value that was read from it keeps its comment there.
    """
    said = list[str]()
    if earlier is not None and earlier.is_file():
        said = earlier.read_text(encoding="utf-8").splitlines()
    kept = dict[str, str]()
    for number, line in enumerate(said, 1):
        _, mark, comment = line.rpartition("  # ")
        if mark:
            kept[f"{shown_path(earlier or Path())}:{number}"] = comment

    def leaf(key: str, value: ResolvedValue, margin: str) -> Lines:
        comment = kept.get(value.where, value.source)
        return [(f"{margin}{key}: {for_any_reader(value.value)}", comment)]

    lines = yaml_lines(nested((entry.path, entry) for entry in resolved.entries), leaf)
    width = min(60, max((len(text) for text, _ in lines), default=0))
    body = "\n".join(_commented(text, comment, width) for text, comment in lines)
    header = f"# Resolved from {resolved.recipe}; each value with its origin.\n" if resolved.recipe else ""
    if any(entry.where in kept for entry in resolved.entries):
        header = f"{said[0]}\n" if said[0].startswith("# ") else ""  # a recipe that came from Python has none
    return f"{header}{body}\n"


def _commented(text: str, comment: str | None, width: int) -> str:
    return f"{text:<{width}}  # {comment}" if comment else text


def nested(leaves: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Nest leaves with dotted paths in a tree, one level per part of a path; a list has the keys 0, 1, …"""
    root: dict[str, Any] = {}
    for path, leaf in leaves:
        *parents, last = path.split(".")
        branch = root
        for part in parents:
            branch = branch.setdefault(part, {})
        branch[last] = leaf
    return root


def yaml_lines(tree: dict[str, Any], leaf: Callable[[str, Any, str], Lines], margin: str = "") -> Lines:
    """A tree of `nested` as YAML; `leaf(key, value, margin)` returns a leaf's lines, the last of which is no
    comment."""
    lines: Lines = []
    for key, child in tree.items():
        if not isinstance(child, dict):
            lines += leaf(key, child, margin)
            continue
        lines.append((f"{margin}{key}:", None))
        if not all(map(is_index, child)):
            lines += yaml_lines(child, leaf, f"{margin}  ")
            continue
        for index in sorted(child, key=int):  # an item of a list: the dash precedes its first field
            inner = yaml_lines(child[index], leaf, f"{margin}    ")
            first = next(i for i, (text, _) in enumerate(inner) if not text.lstrip().startswith("#"))
            for at, (text, comment) in enumerate(inner[: first + 1]):
                dash = "- " if at == first else ""
                lines.append((f"{margin}  {dash}{text.lstrip()}", comment))
            lines += inner[first + 1 :]
    return lines
