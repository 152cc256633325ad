"""Values as JSON that restores their types, between the code of a model and the process that holds its tests.

Only the types listed here cross, and the other side rebuilds them with their own constructors: no pickle, no protocol
of arrays, no method of an object that the code has made. `other` decides what becomes of anything else. Standard
library only; arrays of numpy cross where both processes have numpy.
"""

import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

Other = Callable[[Any], Any]
LARGEST = 1 << 63  # larger whole numbers cross as hexadecimal digits: decimal ones have a limit, and take long
MOST_FIELDS = 255  # of a named tuple
NUMBERS = re.compile(r"[<>|=][biufc]\d{1,2}")  # types of arrays that cross as bytes
FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)}
SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
VIEWS = {"dict_keys": {}.keys, "dict_values": {}.values, "dict_items": {}.items}
_VIEWS = {type(make()): name for name, make in VIEWS.items()}
_TIMES: dict[Any, str] = {date: "date", datetime: "datetime", time: "time"}


def to_plain(value: Any, other: Other) -> Any:
    """Encode plain data as JSON; subclasses of plain types as the type itself. `other` encodes anything else."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return _encode_text(value)
    if isinstance(value, int):
        if -LARGEST < value < LARGEST:
            return int(value)
        return ["int", int.__format__(value, "x")]
    special = _encode_special(value, other)
    if special is not None:
        return special
    for tag, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return [tag, [to_plain(item, other) for item in value]]
    if isinstance(value, dict):
        return ["dict", _pairs(value, other)]
    if isinstance(value, bytes):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, bytearray):
        return ["bytearray", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    return other(value)


def _encode_text(value: str) -> Any:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # two lone surrogates in a row would be read as one character
            return ["text", value.encode("utf-8", "surrogatepass").hex()]
    return value


def _pairs(value: Any, other: Other) -> list[Any]:
    return [[to_plain(key, other), to_plain(item, other)] for key, item in value.items()]


def _encode_special(value: Any, other: Other) -> Any:
    """Encode an object of a type of the standard library or of numpy, that is no subclass; None for others."""
    kind = type(value)
    if kind is Fraction:
        return ["Fraction", [to_plain(value.numerator, other), to_plain(value.denominator, other)]]
    if kind is Decimal:
        return ["Decimal", str(value)]
    if kind in _TIMES:
        return [_TIMES[kind], value.isoformat()]
    if kind is timedelta:
        return ["timedelta", [value.days, value.seconds, value.microseconds]]
    if kind is range:
        return ["range", [to_plain(number, other) for number in (value.start, value.stop, value.step)]]
    if kind is Counter or kind is OrderedDict:
        return [kind.__name__, _pairs(value, other)]
    if kind is defaultdict:
        factory = value.default_factory
        known = next((name for name, each in FACTORIES.items() if each is factory), None)
        return ["defaultdict", [known, _pairs(value, other)]]
    if kind is deque:
        return ["deque", [value.maxlen, [to_plain(item, other) for item in value]]]
    if kind in _VIEWS:
        return [_VIEWS[kind], [to_plain(item, other) for item in value]]
    if isinstance(value, tuple):
        fields = getattr(kind, "_fields", None)
        if isinstance(fields, tuple):
            return ["namedtuple", [kind.__name__, list(fields), [to_plain(item, other) for item in value]]]
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    return _encode_array(numpy, value, other)


def _encode_array(numpy: Any, value: Any, other: Other) -> Any:
    if not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    if value.shape == ():
        if type(value.item()) is not type(value):
            return to_plain(value.item(), other)
        return None
    if NUMBERS.fullmatch(value.dtype.str):
        return ["numbers", [value.dtype.str, list(value.shape), value.tobytes().hex()]]
    if value.dtype.kind in "OSU":
        kind = value.dtype.kind
        return ["array", [kind, list(value.shape), [to_plain(item, other) for item in value.ravel().tolist()]]]
    return None


def from_plain(value: Any, other: Callable[[str, Any], Any]) -> Any:
    """Decode the output of `to_plain`; `other` gets the tag and the contents of anything else.

    Raises: ArithmeticError, LookupError, TypeError, ValueError, RecursionError: it is not the output of `to_plain`.
    """
    if not isinstance(value, list):
        return value
    tag, inside = value
    if tag in SEQUENCES:
        return SEQUENCES[tag](from_plain(item, other) for item in inside)
    if tag == "dict":
        return {from_plain(key, other): from_plain(item, other) for key, item in inside}
    rebuild = _REBUILD.get(tag)
    if rebuild is None:
        return other(tag, inside)
    return rebuild(inside, lambda item: from_plain(item, other))


def _mapping(inside: Any, inner: Callable[[Any], Any]) -> dict[Any, Any]:
    return {inner(key): inner(item) for key, item in inside}


def _default(inside: Any, inner: Callable[[Any], Any]) -> Any:
    name, pairs = inside
    factory = None if name is None else FACTORIES[name]
    return defaultdict(factory, _mapping(pairs, inner))


def _deque(inside: Any, inner: Callable[[Any], Any]) -> Any:
    longest, items = inside
    return deque(map(inner, items), longest)


def _named(inside: Any, inner: Callable[[Any], Any]) -> Any:
    name, fields, items = inside
    if len(fields) > MOST_FIELDS:
        raise ValueError("too many fields")
    return named_tuple(name, tuple(fields))._make(map(inner, items))


@lru_cache(maxsize=64)
def named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """A class of named tuples; ValueError if a name is not an identifier."""
    return namedtuple(name, fields)


def _numbers(inside: Any, inner: Callable[[Any], Any]) -> Any:
    import numpy

    kind, shape, data = inside
    if not NUMBERS.fullmatch(kind):
        raise ValueError("not a type of numbers")
    return numpy.frombuffer(bytearray.fromhex(data), numpy.dtype(kind)).reshape([int(size) for size in shape])


def _array(inside: Any, inner: Callable[[Any], Any]) -> Any:
    import numpy

    kind, shape, items = inside
    sizes = [int(size) for size in shape]
    if kind not in ("O", "S", "U") or len(items) != math.prod(sizes):
        raise ValueError("not an array")
    flat = numpy.empty(len(items), dtype=object)
    for number, item in enumerate(items):
        flat[number] = inner(item)
    if kind != "O":
        flat = flat.astype(kind)
    return flat.reshape(sizes)


_REBUILD: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "int": lambda inside, inner: int(inside, 16),
    "text": lambda inside, inner: bytes.fromhex(inside).decode("utf-8", "surrogatepass"),
    "bytes": lambda inside, inner: bytes.fromhex(inside),
    "bytearray": lambda inside, inner: bytearray.fromhex(inside),
    "complex": lambda inside, inner: complex(*inside),
    "Fraction": lambda inside, inner: Fraction(*map(inner, inside)),
    "Decimal": lambda inside, inner: Decimal(inside),
    "date": lambda inside, inner: date.fromisoformat(inside),
    "datetime": lambda inside, inner: datetime.fromisoformat(inside),
    "time": lambda inside, inner: time.fromisoformat(inside),
    "timedelta": lambda inside, inner: timedelta(*inside),
    "range": lambda inside, inner: range(*map(inner, inside)),
    "Counter": lambda inside, inner: Counter(_mapping(inside, inner)),
    "OrderedDict": lambda inside, inner: OrderedDict(_mapping(inside, inner)),
    "defaultdict": _default,
    "deque": _deque,
    "dict_keys": lambda inside, inner: dict.fromkeys(map(inner, inside)).keys(),
    "dict_values": lambda inside, inner: dict(enumerate(map(inner, inside))).values(),
    "dict_items": lambda inside, inner: dict(map(inner, inside)).items(),
    "namedtuple": _named,
    "numbers": _numbers,
    "array": _array,
}
