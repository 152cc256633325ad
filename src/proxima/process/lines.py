"""Lines of JSON over a socket, each read until a deadline. Standard library only."""

import json
import socket
import time
from collections.abc import Sequence
from typing import Any


def parse_line(line: bytes | bytearray) -> Any:
    """The message in a line; ValueError if it is not JSON, or is nested too deeply."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None


class LineChannel:
    """A connected socket that carries messages, a line of JSON each.

    Args:
        most: bytes of a message that this side reads.
    """

    def __init__(self, connection: socket.socket, most: int = 1 << 30) -> None:
        self.connection, self._most, self._rest = connection, most, bytearray()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message, and file descriptors with it.

        Raises:
            TypeError, ValueError: it is not JSON.
            OSError: the other end is closed.
        """
        line = json.dumps(message).encode() + b"\n"
        sent = socket.send_fds(self.connection, [line], fds) if fds else 0
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
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError
            self.connection.settimeout(remaining)
            part = self.connection.recv(1 << 16)
            if not part:
                raise EOFError
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return parse_line(line)
