"""From a recipe and overrides to a config in which every value knows where it was written.

    read → layers.merged: one tree → builder: typed, checked dataclasses
All problems are collected and raised together as one `ConfigError`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from proxima.config.builder import Builder, ResolvedValue
from proxima.config.describe import fields_of
from proxima.config.families import FAMILIES, command_of, family_of
from proxima.config.layers import merged
from proxima.config.problems import ConfigError, Problem, one_problem
from proxima.config.recipe_reader import read_recipe, shown_path
from proxima.config.scalars import in_one_line, to_json
from proxima.config.schema import RunConfig
from proxima.config.tree import Node, Source, node_of
from proxima.data.errors import FieldError, FieldErrors
from proxima.data.recipe_files import find_recipe
from proxima.data.secret_values import HIDDEN

# a YAML file, a run folder (its `config.yaml`), the name of a recipe (`quickstart`), or a mapping of the same shape
Recipe = str | Path | Mapping[str, Any]
Root = TypeVar("Root", covariant=True)


@dataclass(frozen=True)
class Resolved(Generic[Root]):
    """A config and where each of its values was written.

    Args:
        config: every slot holds its spec.
        entries: all leaves in the order of the schema.
        recipe: the path or name of the recipe; None for a config made from a mapping.
        import_code: whether what it names outside proxima was imported.
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
        """The section, spec or value at a dotted path; None where the command's config lacks the section."""
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
        """Turn each `FieldError` whose field is a path of this config into the user's line, with the value's origin.

        `with resolved.locating(), within("task"): rows = config.task.rows(seed)`. Other errors pass unchanged.
        """
        try:
            yield
        except (FieldError, FieldErrors) as found:
            errors = found.errors if isinstance(found, FieldErrors) else (found,)
            problems = [problem for error in errors if (problem := self._problem_of(error)) is not None]
            if len(problems) < len(errors):
                raise
            raise ConfigError(problems) from found

    def _problem_of(self, error: FieldError) -> Problem | None:
        """None if the field is no path of this config."""
        at = next((entry for entry in self.entries if f"{error.field}.".startswith(f"{entry.path}.")), None)
        if at is None:
            return None
        value = at.value if at.path == error.field and error.value != HIDDEN else to_json(error.value)
        return Problem(error.field, " ".join(error.requirement.split()), in_one_line(value), at.where)


@overload
def resolve(
    recipe: Recipe, overrides: Sequence[str] = (), *, layer: Node | None = None, import_code: bool = True
) -> Resolved[RunConfig]: ...
@overload
def resolve(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    layer: Node | None = None,
    root: type[Root],
    import_code: bool = True,
) -> Resolved[Root]: ...
@overload
def resolve(
    recipe: Recipe, overrides: Sequence[str] = (), *, layer: Node | None = None, root: None, import_code: bool = True
) -> Resolved[Any]: ...
def resolve(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    layer: Node | None = None,
    root: type | None = RunConfig,
    import_code: bool = True,
) -> Resolved[Any]:
    """Read, merge, type and check a recipe.

    Args:
        recipe: see `Recipe`.
        overrides: `key=value` texts with dotted keys; an index addresses a list: `reward.0.weight=2`.
        layer: values over the recipe's and below the overrides, each with its own source (a cell of a sweep).
        root: the config of the command: of a training command, or a dataclass whose fields are sections of one, and the
            recipe may then have the other sections too: the command does not read them. None: the recipe's own.
        import_code: see `Builder`.
    Returns: the config with provenance. No model or data is opened; `check` looks further.
    Raises: ConfigError, with one line for each problem.
    """
    if isinstance(recipe, Mapping):
        layers, name = [node_of(recipe, Source("mapping"))], None
    else:
        layers, name = read_recipe(recipe), shown_path(find_recipe(recipe))
    family = family_of(layers)
    if root is None:
        root = family
    elif root in FAMILIES.values() and root is not family:
        raise _of_another_command(family, root, name)
    tree, refused = merged([*layers, layer] if layer else layers, overrides, family)
    unread = {info.name for info in fields_of(family)} - {info.name for info in fields_of(root)}
    fields = {key: node for key, node in (tree.mapping or {}).items() if key not in unread}
    if family is not RunConfig and root is not family:
        fields = _common_fields(fields, family, root)
    builder = Builder(import_code, refused)
    config = builder.dataclass(root, replace(tree, value=fields), "", "recipe")
    if problems := builder.found():
        whole: Any = object.__new__(root)  # without the sections that have problems
        vars(whole).update(builder.sections)
        raise ConfigError(problems, Resolved(whole, tuple(builder.entries), name, import_code))
    return Resolved(config, tuple(builder.entries), name, import_code)


def _common_fields(fields: Mapping[str, Node], family: type, root: type) -> dict[str, Node]:
    """The sections that mean the same to a command of another family: of each the fields of the class that both derive
    from. `proxima eval` reads the system prompt of a run of SFT, and not how it was evaluated."""
    theirs = {info.name: info.section for info in fields_of(family)}
    ours = {info.name: info.section for info in fields_of(root)}
    kept = {}
    for name, node in fields.items():
        first, second = theirs.get(name), ours.get(name)
        if node.mapping is None or first is None or second is None:
            kept[name] = node
            continue
        shared = [base for base in first.__mro__ if base in second.__mro__ and is_dataclass(base)]
        known = {info.name for info in fields_of(shared[0])} if shared else set()
        kept[name] = replace(node, value={key: child for key, child in node.mapping.items() if key in known})
    return kept


def _of_another_command(family: type, root: type, name: str | None) -> ConfigError:
    """The line for `proxima train` with a recipe of `proxima sft`."""
    right = command_of(family)
    own = getattr(family, "own", None)
    why = f"has a section {own!r}" if own else f"has no section {getattr(root, 'own', '')!r}"
    place = name or "recipe"
    theirs = getattr(root, "own", None)
    meant = f", or write `{theirs}: {{}}` into it" if theirs and not own else ""
    again = " --resume" if name and Path(name).is_dir() else ""
    message = f"is a recipe of `proxima {right}`, because it {why}"
    return one_problem(place, f"{message}; run proxima {right} {place}{again}{meant}")
