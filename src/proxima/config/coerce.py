"""Convert a written value to the annotated type, or raise an error that says what would be accepted."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from proxima.config.describe import options_of
from proxima.config.tree import COMMAND_LINE, Node
from proxima.data.errors import nearest

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
        self.expected, self.where, self.node = expected, where, node


def coerce(node: Node, hint: Any) -> Any:
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
    for option in sorted((o for o in options if o is not NONE), key=lambda option: STRICTNESS.get(option, 5)):
        try:
            return _one(node, option)
        except Mismatch as failure:
            failures.append(failure)
    if len(failures) == 1 and NONE not in options:
        raise failures[0]
    expected = dict.fromkeys([*(failure.expected for failure in failures), *(["null"] if NONE in options else [])])
    raise Mismatch(" or ".join(expected), failures[0].where, failures[0].node)


def _one(node: Node, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin is Literal:
        return _literal(node, get_args(hint))
    if hint in (bool, int, float):
        return _scalar(node, hint)
    if hint in (str, Path):
        return hint(_text(node))
    base = origin or hint
    if base is tuple:
        return tuple(_items(node, _entry_hints(node, get_args(hint))))
    if base in (list, Sequence, Iterable):
        return list(_items(node, (get_args(hint) or (Any,))[:1] * len(node.items or ())))
    if base in (dict, Mapping):
        return _mapping(node, (get_args(hint) or (str, Any))[1])
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
    raise Mismatch(f"one of {', '.join(names)}" + (f"; did you mean {near!r}?" if near else ""))


def _scalar(node: Node, kind: type) -> Any:
    value = node.value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {bool: isinstance(value, bool), int: number and value % 1 == 0, float: number}  # type: ignore[operator]
    if kind is int and fits[int] and abs(value) > LARGEST:  # type: ignore[arg-type]
        raise Mismatch("a whole number of at most 64 bits")
    if fits[kind]:
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


def _items(node: Node, hints: tuple[Any, ...]) -> list[Any]:
    if node.items is None:
        written = f"[{node.text}]" if node.text is not None and node.value is not None else "[…]"
        raise Mismatch(f"a list: {written}")
    return [_child(index, *pair) for index, pair in enumerate(zip(node.items, hints, strict=True))]


def _mapping(node: Node, hint: Any) -> dict[str, Any]:
    if node.mapping is None:
        raise Mismatch("a mapping: {name: value, …}")
    return {key: _child(key, child, hint) for key, child in node.mapping.items()}


def _child(key: object, child: Node, hint: Any) -> Any:
    try:
        return coerce(child, hint)
    except Mismatch as failure:
        raise Mismatch(failure.expected, f".{key}{failure.where}", failure.node or child) from None
