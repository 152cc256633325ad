"""Resolve a recipe and overrides to a config in which every value knows where it was written.

    read → layers.merged: one tree → builder: typed, checked dataclasses
All problems are collected and raised together as one `ConfigError`. No validation library does this: when pydantic or
msgspec refuses a value, the file and line where it was written, and the value of the layer below, are already lost.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.config.builder import Builder
from proxima.config.describe import fields_of, root_field
from proxima.config.families import TRAIN, family_of, family_of_config
from proxima.config.layers import (
    merged,
    with_evaluation_defaults,
    with_held_out_part,
    with_learning_rate,
    with_run_models,
    with_sources_own_rewards,
)
from proxima.config.problems import ConfigError, Problem, one_problem
from proxima.config.recipe_reader import read_recipe
from proxima.config.resolved import Resolved
from proxima.config.schema import CheckConfig, RunConfig
from proxima.config.tree import COMMAND_LINE, FILL_IN, Node, Source, merge, node_of
from proxima.system.user_files import find_recipe, shown_path

# a YAML file, a run folder (its `config.yaml`), the name of a recipe (`quickstart`), or a mapping of the same shape
Recipe = str | Path | Mapping[str, Any]
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Root = TypeVar("Root", default=RunConfig)  # what a call without `root` resolves to
else:
    from typing import TypeVar

    Root = TypeVar("Root")


def resolve(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    layer: Node | None = None,
    root: type[Root] | None = RunConfig,  # type: ignore[assignment]  # the default of Root
    import_code: bool = True,
) -> Resolved[Root]:
    """Read, merge, type and check a recipe.

    Args:
        recipe: see `Recipe`.
        overrides: `key=value` texts with dotted keys; an index addresses a list: `reward.0.weight=2`.
        layer: values laid over the recipe's and below the overrides, each with its own source (a cell of a sweep).
        root: the config of the command: that of one way to train, or a dataclass with some of its sections, and the
            recipe may then have the other sections too: they are not read. None: the recipe's own.
        import_code: see `Builder`.
    Returns: the config with provenance. No model or data is opened; `check` looks further.
    Raises: ConfigError, with one line for each problem; a value that is still to be filled in is one.
    """
    if isinstance(recipe, Mapping):
        layers = [node_of(recipe, Source("mapping"))]
        name = None
    else:
        layers = read_recipe(recipe)
        name = shown_path(find_recipe(recipe))
        if {"recipe", "seeds"} <= (layers[-1].mapping or {}).keys():
            raise one_problem(name, f"is a sweep; run it with proxima sweep {recipe}")
    family = family_of(layers)
    if root is not None and family_of_config(root) is TRAIN is not family:
        raise one_problem(name or "recipe", f"has a section {family.own!r}, and generates no rollouts")
    cls: type = root or family.root
    if layer:
        layers = [*layers, layer]
    tree = merged(layers, overrides, family.root)
    if family is not TRAIN:
        tree = with_learning_rate(tree, family)
    tree = with_run_models(tree)
    written = tree.mapping or {}
    fields = _fields_read(written, family.root, cls)
    fields = with_held_out_part(fields, written.get("task"), family.root, cls, import_code=import_code)
    fields = with_evaluation_defaults(fields, written.get("sampling"), cls)
    if issubclass(cls, RunConfig):
        fields = with_sources_own_rewards(fields)
    missing = list(_to_fill_in(replace(tree, value=fields)))
    if missing:
        raise ConfigError(missing)
    builder = Builder(import_code)
    config = builder.dataclass(cls, replace(tree, value=fields), "", "recipe")
    problems = builder.all_problems()
    if problems:
        raise ConfigError(problems)
    return Resolved(config, tuple(builder.entries), name, import_code)


def _to_fill_in(node: Node, path: str = "") -> Iterator[Problem]:
    """The values that a converted recipe lacks: `proxima peers convert` writes in their place what the file had."""
    if isinstance(node.value, str) and node.value.startswith(FILL_IN):
        reason = node.value.removeprefix(FILL_IN).lstrip(": ") or "the recipe does not say"
        remedy = f"set it in the recipe, or {path}=… on the command line"
        yield Problem(path, f"must be filled in: {reason}; {remedy}", None, node.source.text)
    below: Iterable[tuple[Any, Node]]
    if node.items is not None:
        below = enumerate(node.items)
    else:
        below = (node.mapping or {}).items()
    for name, child in below:
        place = f"{path}.{name}" if path else str(name)
        yield from _to_fill_in(child, place)


def _fields_read(fields: Mapping[str, Node], family: type, root: type) -> dict[str, Node]:
    """The sections that the command reads, and unknown ones, which are errors. If the command has another class for a
    section, the recipe's values are kept for the fields of the common base class alone: `proxima eval` reads the system
    prompt of an SFT run, but not how it was evaluated. A value of the command line is meant for the command's class.

    Raises:
        ConfigError: the command line sets a section that the command does not read.
    """
    theirs = {info.name: info.section for info in fields_of(family)}
    ours = {info.name: info.section for info in fields_of(root)}
    kept = dict[str, Node]()
    unread = list[Problem]()
    for name, node in fields.items():
        if name in theirs and name not in ours:
            said = _of_command_line(node)
            below = name == "sampling" and "eval" in ours  # the defaults of `eval.sampling`
            if said is not None and not below:
                unread.append(_unread(name, said, ours))
            continue
        first = theirs.get(name)
        second = ours.get(name)
        if node.mapping is not None and first is not None and second is not None and first is not second:
            node = replace(node, value=_common_fields(node.mapping, first, second))
        # of a section that the recipe's family lacks, or has as another class, no short form is written out yet
        if name not in theirs or first is not second:
            node = merge(None, node, root_field(root).child(name))
        kept[name] = node
    if unread:
        raise ConfigError(unread)
    return kept


def _unread(name: str, said: Node, ours: Iterable[str]) -> Problem:
    """What the command line says of a section that the command does not read: a problem."""
    path = name
    while said.mapping and len(said.mapping) == 1:
        ((inner, said),) = said.mapping.items()
        path = f"{path}.{inner}"
    message = f"has no effect on this command, which reads {', '.join(ours)}; leave it out"
    return Problem(path, message, said.shown(), COMMAND_LINE.text)


def _common_fields(fields: Mapping[str, Node], first: type, second: type) -> dict[str, Node]:
    """The fields of the base that two classes share, and what the command line says of the others."""
    base = next((cls for cls in first.__mro__ if cls in second.__mro__ and is_dataclass(cls)), None)
    names = set[str]()
    if base:
        names = {info.name for info in fields_of(base)}
    read = dict[str, Node]()
    for key, node in fields.items():
        kept = node if key in names else _of_command_line(node)
        if kept is not None:
            read[key] = kept
    return read


def _of_command_line(node: Node) -> Node | None:
    """The part of a value that the command line sets; None if it sets none. A list is kept whole."""
    if node.mapping is not None:
        parts = {key: _of_command_line(child) for key, child in node.mapping.items()}
        said = {key: child for key, child in parts.items() if child is not None}
        if said or node.source == COMMAND_LINE:
            return replace(node, value=said)
        return None
    below = any(_of_command_line(child) is not None for child in node.items or ())
    return node if below or node.source == COMMAND_LINE else None


def spec_from_words(slot: str, kind: str, fields: Sequence[str]) -> Any:
    """Build the spec of a kind from `field=value` texts.

    Raises: ConfigError for an unknown slot, kind or field, or a value that the field can't take.
    """
    path = "reward.0" if slot == "reward" else slot
    words = [f"{path}.{text}" for text in (f"kind={kind}", *fields)]
    specs = getattr(resolve({}, words, root=CheckConfig).config, slot)
    return specs[0] if slot == "reward" else specs
