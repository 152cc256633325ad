"""Build typed, checked dataclasses from a merged tree; collect each value's provenance and all problems."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from proxima.config.describe import FieldInfo, class_at, fields_of, kinds_of, options_of, table_of
from proxima.config.other_names import misnamed_field
from proxima.config.problems import Problem
from proxima.config.resolved import ResolvedValue
from proxima.config.scalars import in_one_line, to_json
from proxima.config.tree import COMMAND_LINE, DEFAULT, Node
from proxima.data.errors import FieldError, nearest, suggestion
from proxima.data.kinds import Slot
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
        problems = list[Problem]()
        for problem in self.problems:
            if not isinstance(problem, Problem):
                problem = problem()
            problems.append(problem)
        return problems

    def fail(self, path: str, message: str, node: Node | None = None) -> Any:
        problem = Problem(path, message)
        if node is not None:
            problem = Problem(path, message, node.shown(), node.source.text)
        self.problems.append(problem)
        return FAILED

    def leaf(self, path: str, value: object, node: Node, of: FieldInfo | type, default: Any = MISSING) -> Any:
        """Enter the value as a line of `explain`, and return it."""
        source = node.source
        shown = to_json(value)
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
        values = {}
        for key, info in fields.items():
            values[key] = self.field(info, node.mapping.get(key), _join(path, key))
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
            message = " ".join(str(error).split())
            self.problems.append(Problem(path or "recipe", message, None, node.source.text))
            return FAILED

    def refused(self, error: FieldError, node: Node, path: str) -> Any:
        """Record a spec's own error with the full path and the place where the value was written."""
        child: Node | None = node
        for name in error.field.split("."):
            fields = child.mapping if child else None
            child = fields.get(name) if fields else None
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
        if info.name in PLACES:
            value = _expand_user(value)
        return self.leaf(path, value, node, info, info.default)

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
        if node is None:
            node = Node({}, DEFAULT)
        elif node.value is None:
            node = Node({}, node.source)
        chosen = (node.mapping or {}).get("preset")
        if info.presets is not None and chosen is not None:
            presets = table_of(info.presets)
            if chosen.value not in (None, *presets):  # a list has no hash
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
        if isinstance(node.value, str) or node.mapping:  # one spec below another one, where layers don't see the slot
            node = Node([node], node.source)
        if node.items is None:
            return self.fail(path, "must be a list of {kind: …}", node)
        if not node.items and info.default is MISSING and node.source != DEFAULT:
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
        name = kind.value
        if slot.aliases:
            name = str(table_of(slot.aliases).get(name, name))
        cls = self.spec_class(info, slot, kind, name, f"{path}.kind")
        if cls is FAILED:
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
            names = list(table)
            if slot.presets:
                names += table_of(slot.presets)
            remedy = suggestion(name, names, "package.module:Class")
            if table.elsewhere:
                remedy = f"{remedy}; {table.elsewhere}"
            return self.fail(path, f"no {what} {name!r}; {remedy}", kind)
        try:
            spec_class = class_at(name)
            fields_of(spec_class)
        except Exception as error:  # importing runs arbitrary code; all that it raises becomes an error line
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return self.fail(path, f"can't be imported: {reason}; write package.module:Class", kind)
        return spec_class


def _indexed(node: Node) -> Node:
    """Convert `{0: a, 1: b}`, from `reward.0=…` without a list in the layer below, to a list."""
    if not node.mapping:
        return node
    indices = [str(index) for index in range(len(node.mapping))]
    if set(node.mapping) != set(indices):
        return node
    return Node([node.mapping[index] for index in indices], node.source)


PLACES = ("folder", "path")  # fields of any config or spec that name files: `~` in them is the home folder


def _expand_user(value: object) -> Any:
    if isinstance(value, str):
        return os.path.expanduser(value)
    if isinstance(value, tuple):
        return tuple(map(_expand_user, value))
    return value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


NONE = type(None)
LARGEST = 2**63 - 1  # of an integer: files and tensors have no larger ones
# exact types are tried first: in `int | float | str`, `3` is an int and `x` a str
STRICTNESS: Mapping[Any, int] = {bool: 0, int: 1, float: 2, str: 8, Any: 9}


class Mismatch(Exception):
    """The value does not fit the type.

    Args:
        expected: the values that fit, as a phrase after "must be".
        where: path below the field, such as `.2`.
        node: the value below the field that does not fit.
    """

    def __init__(self, expected: str, where: str = "", node: Node | None = None) -> None:
        super().__init__(f"must be {expected}")
        self.expected = expected
        self.where = where
        self.node = node


def coerce(node: Node, hint: object) -> Any:
    """Convert the node's value to `hint`: bool, int, float, str, Literal, None, tuple, list, dict, Path, Any, or a
    union of them.

    An int or a float may be written as any number of that value (`1e3` for an int, `2` for a float); a bool only as
    `true` or `false`; on the command line a text needs no quotes even if it looks like a number. Raises Mismatch, with
    the remedy, for anything else.
    """
    options = options_of(hint)
    if NONE in options and node.value is None:
        return None
    failures: list[Mismatch] = []
    of_values = [option for option in options if option is not NONE]
    for option in sorted(of_values, key=lambda option: STRICTNESS.get(option, 5)):
        try:
            return _one(node, option)
        except Mismatch as failure:
            failures.append(failure)
    if len(failures) == 1 and NONE not in options:
        raise failures[0]
    expected = [failure.expected for failure in failures]
    if NONE in options:
        expected.append("null")
    raise Mismatch(" or ".join(dict.fromkeys(expected)), failures[0].where, failures[0].node)


def _one(node: Node, hint: object) -> Any:
    origin = get_origin(hint)
    if origin is Literal:
        return _literal(node, get_args(hint))
    if hint in (bool, int, float):
        return _scalar(node, hint)
    if hint in (str, Path):
        return hint(_text(node))
    base = origin or hint
    if base is tuple:
        hints = _entry_hints(node, get_args(hint))
        return tuple(_items(node, hints))
    if base in (list, Sequence, Iterable):
        entry, *_ = get_args(hint) or (Any,)
        return _items(node, [entry] * len(node.items or ()))
    if base in (dict, Mapping):
        _, entry = get_args(hint) or (str, Any)
        return _mapping(node, entry)
    return node.to_python()  # Any, or another type: its spec checks the value


def _literal(node: Node, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        same = type(choice) is type(node.value) and choice == node.value
        if same or (isinstance(choice, str) and choice == node.text):
            return choice
    if len(choices) == 1:
        raise Mismatch(f"{choices[0]}")

    names = [str(choice) for choice in choices]
    near = nearest(str(node.to_python()), names)
    meant = f"; did you mean {near!r}?" if near else ""
    raise Mismatch(f"one of {', '.join(names)}{meant}")


def _scalar(node: Node, kind: type) -> Any:
    value = node.value
    fits = False
    if isinstance(value, bool):
        fits = kind is bool
    elif isinstance(value, int | float):
        whole = kind is int and value % 1 == 0
        if whole and abs(value) > LARGEST:
            raise Mismatch("a whole number of at most 64 bits")
        fits = whole or kind is float
    if fits:
        with suppress(OverflowError):  # an integer beyond the largest float
            return kind(value)
    raise Mismatch({bool: "true or false", int: "a whole number", float: "a number"}[kind])


def _text(node: Node) -> str:
    if isinstance(node.value, str):
        if any("\ud800" <= char <= "\udfff" for char in node.value):
            raise Mismatch("a text that UTF-8 can hold")
        if "\0" in node.value:  # no path may have one, and no prompt needs it
            raise Mismatch("a text without NUL characters")
        return node.value
    if node.source == COMMAND_LINE and node.text is not None and node.value is not None:
        return node.text
    if node.mapping is not None or node.items is not None or node.value is None:
        raise Mismatch("a text")
    raise Mismatch(f'a text; put it in quotes: "{node.text}"')


def _entry_hints(node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    count = len(node.items or ())
    if not args:
        return (Any,) * count
    if len(args) == 2 and args[1] is Ellipsis:
        return (args[0],) * count
    if node.items is not None and count != len(args):
        raise Mismatch(f"a list of {len(args)}")
    return args


def _items(node: Node, hints: Sequence[Any]) -> list[Any]:
    if node.items is None:
        written = "[…]"
        if node.text is not None and node.value is not None:
            written = f"[{node.text}]"
        raise Mismatch(f"a list: {written}")
    pairs = zip(node.items, hints, strict=True)
    return [_child(index, child, hint) for index, (child, hint) in enumerate(pairs)]


def _mapping(node: Node, hint: object) -> dict[str, Any]:
    if node.mapping is None:
        raise Mismatch("a mapping: {name: value, …}")
    return {key: _child(key, child, hint) for key, child in node.mapping.items()}


def _child(key: object, child: Node, hint: object) -> Any:
    try:
        return coerce(child, hint)
    except Mismatch as failure:
        raise Mismatch(failure.expected, f".{key}{failure.where}", failure.node or child) from None
