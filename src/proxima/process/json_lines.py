"""Messages between processes: lines of JSON over a socket, each read until a deadline, and values as JSON that restores
their types. Standard library only."""

import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class LineChannel:
    """A connected socket that carries messages, a line of JSON each.

    Args:
        most: bytes of a message that this side reads.
    """

    def __init__(self, connection: socket.socket, most: int = 1 << 30) -> None:
        self.connection = connection
        self._most = most
        self._rest = bytearray()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message, and file descriptors with it.

        Raises:
            TypeError, ValueError: it is not JSON.
            OSError: the other end is closed.
        """
        line = json.dumps(message).encode() + b"\n"
        if fds:
            sent = socket.send_fds(self.connection, [line], fds)
        else:
            sent = 0
        self.connection.sendall(line[sent:])

    def receive(self, deadline: float | None = None) -> Any:
        """Wait for the next message, until a time of `time.monotonic`.

        Raises:
            TimeoutError: the deadline has passed, even if parts of a message arrive.
            EOFError, ConnectionError: the other end is closed.
            ValueError: what arrived is not JSON, is nested too deeply, or is longer than a message may be.
        """
        while b"\n" not in self._rest:
            if len(self._rest) > self._most:
                raise ValueError(f"a message of more than {self._most:,} bytes")
            if deadline is None:
                remaining = None
            else:
                remaining = deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError
            self.connection.settimeout(remaining)
            part = self.connection.recv(1 << 16)
            if not part:
                raise EOFError
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return parse_line(line)


def parse_line(line: bytes | bytearray) -> Any:
    """The message in a line; ValueError if it is not JSON, or is nested too deeply."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None


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
    if tag == "complex":
        return complex(*inside)
    return other(tag, inside)
