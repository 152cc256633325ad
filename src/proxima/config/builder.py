"""Build typed, checked dataclasses from a merged tree; collect each value's provenance and all problems."""

import os
from collections.abc import Callable
from dataclasses import MISSING, replace
from functools import partial
from typing import Any

from proxima.config.coerce import NONE, Mismatch, coerce
from proxima.config.describe import FieldInfo, class_at, fields_of, kinds_of, options_of, table_of
from proxima.config.other_names import misnamed_field
from proxima.config.problems import Problem
from proxima.config.resolved import ResolvedValue
from proxima.config.scalars import in_one_line, to_json
from proxima.config.slots import Slot
from proxima.config.tree import DEFAULT, Node, is_index
from proxima.data.errors import FieldError, suggestion
from proxima.system.secret_values import HIDDEN

FAILED: Any = object()  # in place of a value that has a problem: the object that contains it is not built


class Builder:
    """Walks schema and tree in lockstep, and collects entries and problems.

    Args:
        import_code: import the code outside proxima that a value names: the class of a kind, the function of a reward.
            False: such a kind is a problem, and such a function is not checked.
    """

    def __init__(self, import_code: bool = True) -> None:
        self.import_code = import_code
        self.entries: list[ResolvedValue] = []
        self.problems: list[Problem | Callable[[], Problem]] = []

    def all_problems(self) -> list[Problem]:
        """All problems. Those of unknown keys are worded last: a key may mean a field that was read later."""
        return [problem if isinstance(problem, Problem) else problem() for problem in self.problems]

    def fail(self, path: str, message: str, node: Node | None = None) -> Any:
        shown = (None, None) if node is None else (node.shown(), node.source.text)
        self.problems.append(Problem(path, message, *shown))
        return FAILED

    def leaf(self, path: str, value: Any, node: Node, of: FieldInfo | type, default: Any = MISSING) -> Any:
        """Enter the value as a line of `explain`, and return it."""
        source, shown = node.source, to_json(value)
        usual = source.origin == "default" or (default is not MISSING and shown == to_json(default))
        entry = ResolvedValue(path, shown, node.provenance(), of, source.origin, source.text, usual)
        self.entries.append(entry)
        return value

    def unknown_field(self, path: str, label: str, node: Node, cls: type, slot: Slot | None) -> Problem:
        return misnamed_field(path, label, node, cls, slot, [entry.path for entry in self.entries])

    def dataclass(self, cls: type, node: Node, path: str, label: str, slot: Slot | None = None) -> Any:
        """Build `cls` from a mapping. `label` is its name in errors: the kind of `slot`, or the section's name."""
        if node.mapping is None:
            near = next((info.name for info in fields_of(cls)), "field")
            return self.fail(path, f"must be a mapping of its fields: {{{near}: …}}", node)
        fields = {info.name: info for info in fields_of(cls)}
        before = len(self.problems)
        for key, child in node.mapping.items():
            if key not in fields:
                self.problems.append(partial(self.unknown_field, _join(path, key), label, child, cls, slot))
        values = {key: self.field(info, node.mapping.get(key), _join(path, key)) for key, info in fields.items()}
        if len(self.problems) > before:
            return FAILED
        try:
            spec = cls(**values)
            if self.import_code and hasattr(spec, "check_code"):
                spec.check_code()
            return spec
        except FieldError as error:
            return self.refused(error, node, path)
        except (ValueError, TypeError) as error:  # a spec from outside proxima whose error names no field
            self.problems.append(Problem(path or "recipe", " ".join(str(error).split()), None, node.source.text))
            return FAILED

    def refused(self, error: FieldError, node: Node, path: str) -> Any:
        """Record a spec's own error with the full path and the place where the value was written."""
        child: Node | None = node
        for name in error.field.split("."):
            child = child.mapping.get(name) if child and child.mapping else None
        if child is None:
            child = Node(None, DEFAULT, in_one_line(to_json(error.value)))
        elif error.value == HIDDEN:
            child = replace(child, value=HIDDEN)
        return self.fail(_join(path, error.field), " ".join(error.requirement.split()), child)

    def field(self, info: FieldInfo, node: Node | None, path: str) -> Any:
        if info.slot is not None:
            return self.slot(info, info.slot, node, path)
        if info.section is not None:
            return self.section(info, info.section, node, path)
        if node is None:
            return self.default(info, path)
        node = _indexed(node)
        try:
            value = coerce(node, info.hint)
        except Mismatch as mismatch:
            message = str(mismatch)
            if node.value is None and info.default is not MISSING:
                message += f"; leave it out for {in_one_line(to_json(info.default))}"
            return self.fail(path + mismatch.where, message, mismatch.node or node)
        return self.leaf(path, _expand_user(value) if info.name in PLACES else value, node, info, info.default)

    def default(self, info: FieldInfo, path: str) -> Any:
        if info.default is MISSING:
            meaning = f": {info.help.removesuffix('.')}" if info.help else ""
            return self.fail(path, f"is missing{meaning}; set it in the recipe, or {path}=… on the command line")
        return self.leaf(path, info.default, Node(None, DEFAULT), info)

    def section(self, info: FieldInfo, inner: type, node: Node | None, path: str) -> Any:
        optional = NONE in options_of(info.hint)
        if node is None and (optional or info.default is MISSING):
            return self.default(info, path)
        if optional and node is not None and node.value is None:
            return self.leaf(path, None, node, info, info.default)
        if node is None or node.value is None:
            node = Node({}, DEFAULT if node is None else node.source)
        if info.presets is not None and (chosen := (node.mapping or {}).get("preset")) is not None:
            presets = table_of(info.presets)
            if chosen.value not in (None, *presets):
                message = f"no preset {chosen.shown()!r}; {suggestion(chosen.shown(), presets)}"
                return self.fail(f"{path}.preset", message, chosen)
        return self.dataclass(inner, node, path, info.name)

    def slot(self, info: FieldInfo, slot: Slot, node: Node | None, path: str) -> Any:
        if node is None and slot.default is not None and not slot.many:
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
            return self.leaf(path, (), node, info, info.default)
        specs = tuple(self.spec(info, slot, child, f"{path}.{index}") for index, child in enumerate(node.items))
        return FAILED if any(spec is FAILED for spec in specs) else specs

    def spec(self, info: FieldInfo, slot: Slot, node: Node, path: str) -> Any:
        if node.value is None:
            if info.default is slot.default is None:  # else there is a kind for what is not set
                return self.leaf(path, None, node, info, None)
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
        if not self.import_code and ":" in kind.value and not kind.value.startswith("proxima."):
            message = "is code outside proxima, which this command does not run unasked; add --import-code"
            return self.fail(f"{path}.kind", message, kind)
        name = str(table_of(slot.aliases).get(kind.value, kind.value)) if slot.aliases else kind.value
        if (cls := self.spec_class(info, slot, kind, name, f"{path}.kind")) is FAILED:
            return FAILED
        usual = slot.default if slot.default and not slot.many else MISSING
        self.leaf(f"{path}.kind", name, kind, cls, usual)
        rest = {key: child for key, child in node.mapping.items() if key != "kind"}
        return self.dataclass(cls, replace(node, value=rest), path, kind.value, slot)

    def spec_class(self, info: FieldInfo, slot: Slot, kind: Node, name: str, path: str) -> Any:
        """The class of a kind: `name` is a key of the slot's table or `package.module:Class`."""
        table = kinds_of(slot)
        if name in table:
            return table[name]
        if ":" not in name:
            what = info.name if info.name.endswith("ss") else info.name.removesuffix("s")
            names = [*table, *(table_of(slot.presets) if slot.presets else ())]
            return self.fail(path, f"no {what} {name!r}; {suggestion(name, names, 'package.module:Class')}", kind)
        try:
            fields_of(spec_class := class_at(name))
        except Exception as error:  # importing runs arbitrary code; all that it raises becomes an error line
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return self.fail(path, f"can't be imported: {reason}; write package.module:Class", kind)
        return spec_class


def _indexed(node: Node) -> Node:
    """Convert `{0: a, 1: b}`, from `reward.0=…` without a list in the layer below, to a list."""
    keys = sorted(node.mapping or {}, key=lambda key: int(key) if is_index(key) else -1)
    if node.mapping and keys == [str(index) for index in range(len(keys))]:
        return Node([node.mapping[key] for key in keys], node.source)
    return node


PLACES = ("folder", "path")  # fields of any config or spec that name files: `~` in them is the home folder


def _expand_user(value: Any) -> Any:
    if isinstance(value, str | tuple):
        return os.path.expanduser(value) if isinstance(value, str) else tuple(map(_expand_user, value))
    return value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
