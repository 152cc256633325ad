"""A recipe before it has types, as a tree of nodes that know where they were written; and the merging of layers.

Layers, lowest first: the preset, the recipe that is extended, the recipe, the command line. Mappings merge key by key;
anything else is replaced. One exception: `kind` (of a slot) and `preset` say what their siblings mean, so a layer that
changes one of them drops the siblings of the layers below.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from proxima.config.describe import NO_FIELD, FieldInfo
from proxima.config.problems import one_problem
from proxima.config.scalars import in_one_line

# what `proxima peers convert` writes where a value is missing: in its place, which `resolve` refuses, or as the comment
# after a stand-in, which `train` refuses
FILL_IN = "TO FILL IN"
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Source:
    """The place where a value was written. `text` is shown to the user, `short` after an overridden value."""

    text: str
    origin: Literal["file", "command line", "preset", "default"] = "file"

    @property
    def short(self) -> str:
        if self.origin == "file":
            return self.text.removesuffix(f", {FILL_IN}")
        return f"the {self.origin}"


DEFAULT = Source("default", "default")
COMMAND_LINE = Source("command line", "command line")


@dataclass(frozen=True)
class Node:
    """A scalar, a mapping or a list of nodes.

    Args:
        value: its content.
        source: where it was written.
        text: a scalar as it was written, such as `1e-5`; None for mappings and lists.
        over: the node it replaced, from the layer below.
    """

    value: "Scalar | dict[str, Node] | list[Node]"
    source: Source
    text: str | None = None
    over: "Node | None" = None

    @property
    def mapping(self) -> "dict[str, Node] | None":
        return self.value if isinstance(self.value, dict) else None

    @property
    def items(self) -> "list[Node] | None":
        return self.value if isinstance(self.value, list) else None

    def at(self, key: str) -> "Scalar | dict[str, Node] | list[Node]":
        """The value of a field of this mapping; None if it is not written."""
        child = (self.mapping or {}).get(key)
        return None if child is None else child.value

    def to_python(self) -> Any:
        """The value without nodes: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: child.to_python() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.to_python() for child in self.value]
        return self.value

    def shown(self) -> str:
        """The value in one line, as a user would type it; long ones are cut."""
        if isinstance(self.value, str):
            line = " ".join(self.value.split()) or "''"
        elif self.text is not None:
            line = self.text
        else:
            line = in_one_line(self.to_python())
        return line if len(line) <= 60 else line[:57] + "..."

    def provenance(self) -> str:
        """The origin of the value: `command line, over 0.15 of the preset`. A default is nobody's choice and goes
        unsaid."""
        over = self.over
        if over is None or over.source.origin == "default" or isinstance(over.value, dict | list):
            return self.source.text
        return f"{self.source.text}, over {over.shown()} of {over.source.short}"


def node_of(value: Any, source: Source, of_kinds: Source | None = None) -> Node:
    """Convert a plain value (dicts, lists, scalars) to a tree whose nodes all have one source, except that every `kind`
    has that `of_kinds`, if it is given."""
    if isinstance(value, Mapping):
        fields = {}
        for key, child in value.items():
            own = source
            if key == "kind" and of_kinds is not None:
                own = of_kinds
            fields[str(key)] = node_of(child, own, of_kinds)
        return Node(fields, source)
    if isinstance(value, list | tuple):
        return Node([node_of(child, source, of_kinds) for child in value], source)
    text = value if isinstance(value, str) else in_one_line(value)
    return Node(value, source, text)


def merge(base: Node | None, top: Node, info: FieldInfo = NO_FIELD, path: str = "") -> Node:
    """Lay `top` over `base`; ConfigError for an index (`reward.3.weight=2`) beyond the end of the list below."""
    top = _long_form(top, info)
    if base is None:
        if info.section is None or top.mapping is None:
            return top
        fields = {key: merge(None, child, info.child(key)) for key, child in top.mapping.items()}
        return replace(top, value=fields)
    base = _long_form(base, info)
    if base.items is not None and _is_of_one(top, info):
        top = _at_first(base.items, top, path)
    if base.items is not None and _is_indices(top):
        return _merge_indices(base, top, info, path)
    if base.mapping is None or top.mapping is None:
        if top.source.origin == base.source.origin == "preset":  # a lower layer has already written the preset out
            return base
        return replace(top, over=base)
    if info.head is not None:
        changed = _another(base.mapping, top.mapping, info)
        if changed is not None:
            return replace(top, value={**top.mapping, info.head: changed}, over=base)
    merged = dict(base.mapping)
    for key, child in top.mapping.items():
        below = f"{path}.{key}" if path else key
        merged[key] = merge(base.mapping.get(key), child, info.child(key), below)
    return Node(merged, base.source)


def _another(base: dict[str, Node], top: dict[str, Node], info: FieldInfo) -> Node | None:
    """The head of `top` if it differs from that of `base`; None if not."""
    assert info.head is not None
    new = top.get(info.head)
    written = base.get(info.head)
    before: object = info.slot.default if info.slot else None
    if written is not None:
        before = written.value
    if new is None or before is None or new.value == before:
        return None
    if written is None:
        return new
    return replace(new, over=written)


def _long_form(node: Node, info: FieldInfo) -> Node:
    """Expand `cppo` to `{kind: cppo}`, `none` to null, and one spec to a list of one."""
    if info.slot and info.slot.many:
        if node.items is None and node.value is not None and not _is_indices(node) and not _is_of_one(node, info):
            node = Node([node], node.source)
        if node.items is not None:
            return replace(node, value=[_long_form(child, info.entry) for child in node.items])
        return node
    if info.head == "kind" and node.value == "none":
        return replace(node, value=None)
    if info.head is not None and isinstance(node.value, str):
        return Node({info.head: node}, node.source)
    return node


def _is_of_one(node: Node, info: FieldInfo) -> bool:
    """True for `reward.path=…`: fields of a list's only entry, whose kind is that of the layer below."""
    fields = None
    if info.slot and info.slot.many and node.source.origin == "command line":
        fields = node.mapping
    return bool(fields) and info.head not in (fields or {}) and not _is_indices(node)


def _at_first(entries: list[Node], top: Node, path: str) -> Node:
    """Address fields of the only entry as those of entry 0; ConfigError unless there is exactly one entry."""
    if len(entries) != 1:
        field, value = next(iter((top.mapping or {}).items()))
        remedy = f"write {path}={{kind: …, {field}: …}}"
        if entries:
            remedy = f"did you mean {path}.0.{field}?"
        message = f"{path!r} has {len(entries)} entries; {remedy}"
        raise one_problem(f"{path}.{field}", message, value.shown(), value.source.text)
    return Node({"0": top}, top.source)


def _is_indices(node: Node) -> bool:
    return bool(node.mapping) and all(map(is_index, node.mapping or ()))


def is_index(key: str) -> bool:
    """True for the number of an entry in a list, as `reward.3.weight=2` has it."""
    return key.isascii() and key.isdigit() and len(key) < 10


def _merge_indices(base: Node, top: Node, info: FieldInfo, path: str) -> Node:
    entries = list(base.items or ())
    children = top.mapping or {}
    for key in sorted(children, key=int):
        child = children[key]
        index = int(key)
        if index > len(entries):
            written = f"{path}.{key}"
            while child.mapping and len(child.mapping) == 1:
                ((inner, child),) = child.mapping.items()
                written = f"{written}.{inner}"
            noun = "entry" if len(entries) == 1 else "entries"
            message = f"{path!r} has {len(entries)} {noun}; {path}.{len(entries)} adds one"
            raise one_problem(written, message, child.shown(), child.source.text)
        below = entries[index] if index < len(entries) else None
        merged = merge(below, child, info.entry, f"{path}.{key}")
        entries[index : index + 1] = [merged]
    return Node(entries, base.source)
