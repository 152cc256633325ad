"""Values as JSON that restores their types, for messages between processes. Standard library only."""

from collections.abc import Callable
from typing import Any

_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Encode plain data as JSON, subclasses as their base type; `other` encodes anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for tag, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return [tag, [encode(item, other) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, other), encode(item, other)] for key, item in value.items()]]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    return other(value)


def decode(value: Any, other: Callable[[str, Any], Any]) -> Any:
    """Decode the output of `encode`; `other` gets the tag and the contents of anything else."""
    if not isinstance(value, list):
        return value
    tag, inside = value
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](decode(item, other) for item in inside)
    if tag == "dict":
        return {decode(key, other): decode(item, other) for key, item in inside}
    if tag == "bytes":
        return bytes.fromhex(inside)
    return complex(*inside) if tag == "complex" else other(tag, inside)
