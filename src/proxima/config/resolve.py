"""From a recipe and overrides to a config in which every value knows where it was written.

    read → layers.merged: one tree → builder: typed, checked dataclasses
All problems are collected and raised together as one `ConfigError`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, overload

from proxima.config.builder import Builder
from proxima.config.describe import fields_of
from proxima.config.families import TRAIN, Family, family_of, family_of_config
from proxima.config.layers import merged, with_learning_rate
from proxima.config.problems import ConfigError, one_problem
from proxima.config.recipe_reader import read_recipe, shown_path
from proxima.config.resolved import Resolved
from proxima.config.schema import RunConfig
from proxima.config.tree import Node, Source, node_of
from proxima.data.recipe_files import find_recipe

# a YAML file, a run folder (its `config.yaml`), the name of a recipe (`quickstart`), or a mapping of the same shape
Recipe = str | Path | Mapping[str, Any]
Root = TypeVar("Root")


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
    if root is not None and (wanted := family_of_config(root)) not in (None, family):
        raise _of_another_command(family, wanted, name)
    root = root or family.root
    tree, refused = merged([*layers, layer] if layer else layers, overrides, family.root)
    tree = with_learning_rate(tree, family)
    unread = {info.name for info in fields_of(family.root)} - {info.name for info in fields_of(root)}
    fields = {key: node for key, node in (tree.mapping or {}).items() if key not in unread}
    if family is not TRAIN and root is not family.root:
        fields = _common_fields(fields, family.root, root)
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


def _of_another_command(family: Family, wanted: Family, name: str | None) -> ConfigError:
    """The line for `proxima train` with a recipe of `proxima sft`."""
    why = f"has a section {family.own!r}" if family.own else f"has no section {wanted.own!r}"
    place = name or "recipe"
    meant = "" if family.own else f", or write `{wanted.own}: {{}}` into it"
    again = " --resume" if name and Path(name).is_dir() else ""
    message = f"is a recipe of `proxima {family.command}`, because it {why}"
    return one_problem(place, f"{message}; run proxima {family.command} {place}{again}{meant}")
