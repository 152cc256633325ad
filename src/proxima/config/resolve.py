"""From a recipe and overrides to a `RunConfig` in which every value knows where it came from.

    layers (preset ← extended recipe ← recipe ← command line) → one tree → typed, checked dataclasses
All problems are collected and raised together as one `ConfigError`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

from proxima.config.coerce import NONE, Mismatch, coerce
from proxima.config.describe import (
    FieldInfo,
    canonical,
    dataclass_in,
    fields_of,
    layout_of,
    lookup,
    options_of,
    summary_of,
    table_of,
)
from proxima.config.errors import ConfigError, Problem, one_problem, suggestion
from proxima.config.read import read_overrides, read_recipe, shown_path
from proxima.config.scalars import in_one_line
from proxima.config.schema import RunConfig, Slot
from proxima.config.tree import DEFAULT, Layout, Node, Source, merge, node_of
from proxima.data.errors import FieldError


@dataclass(frozen=True)
class Entry:
    """One line of `explain`.

    Args:
        path: dotted path of a leaf, `algorithm.surrogate.delta`, or of a slot's `kind`.
        value: plain value: scalars, lists, dicts.
        source: where it came from, `command line, over 0.15 of the preset`; `where` is the first half of it.
        help: meaning and unit.
        origin: `file`, `command line`, `preset` or `default`.
    """

    path: str
    value: Any
    source: str
    help: str
    origin: str
    where: str

    @classmethod
    def of(cls, path: str, value: Any, node: Node, help: str) -> "Entry":
        return cls(path, value, node.provenance(), help, node.source.origin, node.source.text)


@dataclass(frozen=True)
class Resolved:
    """A config and where each of its values came from.

    Args:
        config: the whole thing, every slot holding its spec.
        entries: all leaves in the order of the schema.
        recipe: the path of the recipe as given; None for a config made from a mapping.
    """

    config: RunConfig
    entries: tuple[Entry, ...]
    recipe: str | None = None

    def entry(self, path: str) -> Entry:
        """The entry at a path; a path of a slot or section gives its first entry (its kind).

        Raises:
            KeyError: there is none.
        """
        for entry in self.entries:
            if entry.path == path or entry.path.startswith(path + "."):
                return entry
        raise KeyError(path)

    def problem(self, path: str, message: str) -> Problem:
        """A problem with the value at `path`, with its value and source."""
        entry = self.entry(path)
        return Problem(entry.path, message, in_one_line(entry.value), entry.where)

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Turn a `FieldError` whose field is a path of this config into the user's line, with the value's origin.

        `with resolved.locating(), within("task"): rows = config.task.rows(seed)`. Other errors pass unchanged.
        """
        try:
            yield
        except FieldError as error:
            at = next((e for e in self.entries if error.field == e.path or error.field.startswith(e.path + ".")), None)
            if at is None:
                raise
            value = at.value if at.path == error.field else plain(error.value)
            message = " ".join(error.requirement.split())
            raise ConfigError([Problem(error.field, message, in_one_line(value), at.where)]) from error


def resolve(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Resolved:
    """Read, merge, type and check a recipe.

    Args:
        recipe: a YAML file, a run folder (its `config.yaml`), or a mapping of the same shape.
        overrides: `key=value` texts with dotted keys; an index addresses a list: `reward.0.weight=2`.

    Returns: the config with provenance. No model or data is opened; `check` looks further.

    Raises:
        ConfigError: one line for each problem.
    """
    layout = layout_of(RunConfig)
    if isinstance(recipe, Mapping):
        layers, name = [node_of(recipe, Source("mapping"))], None
    else:
        layers, name = read_recipe(recipe), shown_path(Path(recipe))
    tree = Node({}, layers[-1].source)
    for layer in [*layers, read_overrides(overrides, layout)]:
        tree = _lay_over_presets(
            merge(tree, layer, layout), layout
        )  # at once, so that the next layer sees which kinds it changes
    tree = _lay_over_evaluation(tree, layout)
    builder = _Builder()
    config = builder.dataclass(RunConfig, tree, "", "recipe")
    builder.finish()
    assert isinstance(config, RunConfig)
    return Resolved(config, tuple(builder.entries), name)


def _lay_over_presets(tree: Node, layout: Layout) -> Node:
    """Put the preset below what the user wrote in the fields that may name one."""
    fields = dict(tree.mapping or {})
    for info in fields_of(RunConfig):
        node = fields.get(info.name)
        chosen = node.mapping.get("preset") if info.presets and node and node.mapping else None
        if chosen is None or chosen.value is None:
            continue
        assert info.presets is not None and node is not None
        presets = table_of(info.presets.table)
        if chosen.value not in presets:
            message = f"no preset {chosen.shown()!r}; {suggestion(chosen.shown(), presets)}"
            raise one_problem(f"{info.name}.preset", message, chosen.shown(), chosen.source.text)
        below = node_of(presets[str(chosen.value)], Source(f"preset {chosen.value}", "preset"))
        below = _say_who_chose(below, f"preset {chosen.value}, chosen in {chosen.source.text}")
        fields[info.name] = merge(below, node, layout.child(info.name), info.name)
    return replace(tree, value=fields)


def _say_who_chose(node: Node, text: str) -> Node:
    """The long form of the source on every `kind`, the short one elsewhere."""
    if node.items is not None:
        return replace(node, value=[_say_who_chose(child, text) for child in node.items])
    if node.mapping is None:
        return node
    source = replace(node.source, text=text)
    fields = {
        key: replace(child, source=source) if key == "kind" else _say_who_chose(child, text)
        for key, child in node.mapping.items()
    }
    return replace(node, value=fields)


def _lay_over_evaluation(tree: Node, layout: Layout) -> Node:
    """Put the training's sampling below `eval.sampling`, where there is an evaluation: all of it for several samples a
    question, else its `max_tokens` and `stop`, and greedy."""
    fields = dict(tree.mapping or {})
    evaluation = fields.get("eval")
    if (
        evaluation is None
        or evaluation.mapping is None
        or evaluation.mapping.get("task", Node(None, DEFAULT)).value is None
    ):
        return tree
    samples = evaluation.mapping.get("samples", Node(1, DEFAULT)).value
    several = isinstance(samples, int) and samples > 1
    below = {} if several else {"temperature": Node(0.0, Source("default, evaluation is greedy", "default"), "0")}
    training = fields.get("sampling")
    for key in (*(("temperature", "top_k", "top_p", "min_p") if several else ()), "max_tokens", "stop"):
        if training and training.mapping and key in training.mapping:
            below[key] = replace(training.mapping[key], source=Source(f"as sampling.{key}", "default"), over=None)
    written = evaluation.mapping.get("sampling")
    base = Node(dict(below), DEFAULT)
    merged = (
        base
        if written is None or written.value is None
        else merge(base, written, layout.child("eval").child("sampling"))
    )
    fields["eval"] = replace(evaluation, value={**evaluation.mapping, "sampling": merged})
    return replace(tree, value=fields)


class _Failed:
    """Stands for a value that has a problem, so that what contains it is not built."""


FAILED = _Failed()


class _Builder:
    """Walks schema and tree together; collects entries and problems."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.problems: list[Problem] = []
        self.unknown: list[tuple[int, str, str, Node, type]] = []

    def finish(self) -> None:
        """Raise what was found. Unknown keys come last because their remedy may be a field found elsewhere."""
        problems = list(self.problems)
        for shift, (index, path, label, node, cls) in enumerate(self.unknown):
            problems.insert(index + shift, self.unknown_field(path, label, node, cls))
        if problems:
            raise ConfigError(problems)

    def fail(self, path: str, message: str, node: Node | None = None) -> Any:
        shown = (None, None) if node is None else (node.shown(), node.source.text)
        self.problems.append(Problem(path, message, *shown))
        return FAILED

    def unknown_field(self, path: str, label: str, node: Node, cls: type) -> Problem:
        name = path.rpartition(".")[2]
        remedy = suggestion(name, [info.name for info in fields_of(cls)])
        elsewhere = [entry.path for entry in self.entries if entry.path.rpartition(".")[2] == name]
        if not remedy.startswith("did") and elsewhere:
            remedy = f"did you mean {elsewhere[0]!r}?"
        while node.source.origin == "command line" and node.mapping and len(node.mapping) == 1:
            (key, node), *_ = node.mapping.items()
            path = f"{path}.{key}"
        return Problem(path, f"{label!r} has no field {name!r}; {remedy}", node.shown(), node.source.text)

    def dataclass(self, cls: type, node: Node, path: str, label: str) -> Any:
        """Build `cls` from a mapping. `label` is what errors call it: the kind, or the section's name."""
        if node.mapping is None:
            near = next((info.name for info in fields_of(cls)), "field")
            return self.fail(path, f"must be a mapping of its fields: {{{near}: …}}", node)
        known = {info.name for info in fields_of(cls)}
        before = len(self.problems) + len(self.unknown)
        for key, child in node.mapping.items():
            if key not in known:
                self.unknown.append((len(self.problems), _join(path, key), label, child, cls))
        values = {
            info.name: self.field(info, node.mapping.get(info.name), _join(path, info.name)) for info in fields_of(cls)
        }
        if len(self.problems) + len(self.unknown) > before:
            return FAILED
        try:
            return cls(**values)
        except FieldError as error:
            return self.refused(error, node, path)
        except (ValueError, TypeError) as error:  # a spec from elsewhere that names no field
            self.problems.append(Problem(path or "recipe", " ".join(str(error).split()), None, node.source.text))
            return FAILED

    def refused(self, error: FieldError, node: Node, path: str) -> Any:
        """A spec's own error with the full path and the place where the value was written."""
        child: Node | None = node
        for name in error.field.split("."):
            child = child.mapping.get(name) if child and child.mapping else None
        if child is None:
            child = Node(None, DEFAULT, in_one_line(plain(error.value)))
        return self.fail(_join(path, error.field), " ".join(error.requirement.split()), child)

    def field(self, info: FieldInfo, node: Node | None, path: str) -> Any:
        if info.slot is not None:
            return self.slot(info, info.slot, node, path)
        inner = dataclass_in(info.hint)
        if inner is not None:
            return self.section(info, inner, node, path)
        if node is None:
            return self.default(info, path)
        node = _indexed(node)
        try:
            value = coerce(node, info.hint)
        except Mismatch as mismatch:
            return self.fail(path + mismatch.where, str(mismatch), mismatch.node or node)
        self.entries.append(Entry.of(path, plain(value), node, info.help))
        return value

    def default(self, info: FieldInfo, path: str) -> Any:
        if info.default is MISSING:
            meaning = f": {info.help.removesuffix('.')}" if info.help else ""
            return self.fail(path, f"is missing{meaning}; set it in the recipe, or {path}=… on the command line")
        self.entries.append(Entry.of(path, plain(info.default), Node(None, DEFAULT), info.help))
        return info.default

    def section(self, info: FieldInfo, inner: type, node: Node | None, path: str) -> Any:
        optional = NONE in options_of(info.hint)
        if node is None and (optional or info.default is MISSING):
            return self.default(info, path)
        if optional and node is not None and node.value is None:
            self.entries.append(Entry.of(path, None, node, info.help))
            return None
        if node is None or node.value is None:
            node = Node({}, DEFAULT if node is None else node.source)
        return self.dataclass(inner, node, path, info.name)

    def slot(self, info: FieldInfo, slot: Slot, node: Node | None, path: str) -> Any:
        if node is None and slot.default is not None:
            node = Node({"kind": Node(slot.default, DEFAULT, slot.default)}, DEFAULT)
        if node is None:
            return self.default(info, path)
        if not slot.many:
            return self.spec(info, slot, node, path)
        node = _indexed(node)
        if node.value is None:
            node = Node([], node.source)
        if node.items is None:
            return self.fail(path, "must be a list of {kind: …}", node)
        if not node.items and info.default is MISSING:
            return self.fail(path, f"must name at least one; see `proxima list {info.name}`", node)
        if not node.items:
            self.entries.append(Entry.of(path, [], node, info.help))
            return ()
        specs = tuple(self.spec(info, slot, child, f"{path}.{index}") for index, child in enumerate(node.items))
        return FAILED if any(spec is FAILED for spec in specs) else specs

    def spec(self, info: FieldInfo, slot: Slot, node: Node, path: str) -> Any:
        if node.value is None:
            if info.default is None:
                self.entries.append(Entry.of(path, None, node, info.help))
                return None
            return self.fail(path, f"can't be null; name a kind: {', '.join(sorted(table_of(slot.table)))}", node)
        if isinstance(node.value, str):
            node = Node({"kind": node}, node.source)
        if node.mapping is None:
            return self.fail(path, "must be a kind or {kind: …, fields}", node)
        kind = node.mapping.get("kind")
        if kind is None and slot.default is not None:
            kind = Node(slot.default, DEFAULT, slot.default)
        if kind is None or not isinstance(kind.value, str):
            return self.fail(f"{path}.kind", f"is missing; one of {', '.join(sorted(table_of(slot.table)))}", kind)
        try:
            cls = lookup(kind.value, slot, path, kind.source.text)
        except ConfigError as error:
            self.problems.extend(error.problems)
            return FAILED
        self.entries.append(Entry.of(f"{path}.kind", canonical(kind.value, slot), kind, summary_of(cls)))
        rest = {key: child for key, child in node.mapping.items() if key != "kind"}
        return self.dataclass(cls, replace(node, value=rest), path, kind.value)


def _indexed(node: Node) -> Node:
    """`{0: a, 1: b}`, from `reward.0=…` with no list below, as a list."""
    keys = sorted(node.mapping or {}, key=lambda key: int(key) if key.isdigit() else -1)
    if node.mapping and keys == [str(index) for index in range(len(keys))]:
        return Node([node.mapping[key] for key in keys], node.source)
    return node


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def plain(value: Any) -> Any:
    """A field's value as JSON has it: tuples become lists, paths texts."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value
