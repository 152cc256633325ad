"""Messages between ranks outside the computation: lines of JSON over a socket from each rank to the first.

The socket is a dedicated one, because it closes as soon as the process ends, whatever that was doing, and because a
collective would wait for a rank that doesn't enter it. No data of the model goes through it.
"""

import json
import socket
import traceback
from contextlib import suppress
from typing import Any

from proxima.data import UserError

SILENT_BEATS = 3  # missed heartbeats after which a rank counts as silent
SEND_SECONDS = 5.0
LOST_PEER = ("gloo/transport", "Connection closed by peer", "Connection reset", "NCCL", "Broken pipe", "Timed out wait")


def host_name() -> str:
    return socket.gethostname()


class Channel:
    """A connected socket that carries whole messages."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.settimeout(SEND_SECONDS)
        self._rest = b""

    def send(self, **message: Any) -> None:
        """Send a message, if the other side is still connected."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message, default=repr).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for data, and return the messages that have arrived; None if the other side is gone."""
        try:
            chunk = self.connection.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not chunk:
            return None
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):  # not one of our messages
            return None


def told_error(error: BaseException) -> dict[str, Any]:
    """The message about an exception; `follows` is true if it is only a consequence of losing another rank."""
    name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return {
        "text": f"{name}{' '.join(str(error).split())}"[:2000],
        "trace": "".join(traceback.format_exception(error)),
        "refused": isinstance(error, UserError),
        "follows": follows_from_loss(error),
    }


def follows_from_loss(error: BaseException) -> bool:
    """True if an exception says that another rank is gone. torch has no exception class for this over gloo."""
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in LOST_PEER)


def span_of(ranks: list[int]) -> str:
    """`rank 2`, `ranks 1-3, 6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
