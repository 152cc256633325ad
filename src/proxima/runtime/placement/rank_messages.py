"""Messages between ranks outside the computation: lines of JSON over a socket from each rank to the first.

The socket is a dedicated one, because it closes as soon as the process ends, whatever that was doing, and because a
collective would wait for a rank that doesn't enter it. No data of the model goes through it.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import TextIOBase
from typing import Any

from proxima.data import UserError
from proxima.system.bounded_reading import parse_json
from proxima.training.process_ranks import ProcessRanks

BEAT_SECONDS = 1.0  # between two signs of life
SILENT_SECONDS = 30.0  # without one after which a rank counts as silent
SEND_SECONDS = 5.0
BEAT = {"call": str, "part": str, "collective": str, "waits": bool, "issued": int, "still": float}
MOST_MESSAGE = 1 << 26  # bytes; a longer one is not a rank's
LONGEST_TRACE = 1 << 18  # characters, of its end
FOLD_SECONDS = 1.0  # in which other ranks may print the same line
LOST_PEER = ("gloo/transport", "Connection closed by peer", "Connection reset", "NCCL", "Broken pipe", "Timed out wait")


def silent_seconds(timeout: float) -> float:
    """`SILENT_SECONDS`, or less if the ranks are given up soon: a warning comes first."""
    return min(SILENT_SECONDS, timeout / 3)


class Channel:
    """A connected socket that carries whole messages."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.settimeout(SEND_SECONDS)
        self._rest = bytearray()
        self._sending = threading.Lock()

    def send(self, **message: object) -> None:
        """Send a message, if the other side is still connected; from any thread."""
        with self._sending, suppress(OSError):
            self.connection.sendall(json.dumps(message, default=repr).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for data, and return the messages that have arrived; None if the other side is gone, or is no rank."""
        try:
            chunk = self.connection.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        self._rest += chunk
        if not chunk or len(self._rest) > MOST_MESSAGE:
            return None
        if b"\n" not in chunk:
            return []
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        try:
            messages = [parse_json(bytes(line)) for line in lines]
        except ValueError:
            return None
        if all(isinstance(message, dict) for message in messages):
            return messages
        return None


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """An error that ends a rank, and perhaps the run.

    Args:
        trace: traceback of the rank; empty if it has sent no traceback.
        refused: True if the user can repair what is wrong, as with a `UserError` on rank 0.
        follows: True if it only says that another rank is gone.
    """

    text: str
    trace: str = ""
    refused: bool = False
    follows: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "RankFailure":
        if isinstance(error, UserError):
            name = ""
        else:
            name = f"{type(error).__name__}: "
        return cls(
            text=f"{name}{' '.join(str(error).split())}"[:2000],
            trace="".join(traceback.format_exception(error))[-LONGEST_TRACE:],
            refused=isinstance(error, UserError),
            follows=follows_from_loss(error),
        )


def checked_beat(beat: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a rank's status as `RankStatus.beat` makes it.

    Raises:
        KeyError, TypeError: it isn't one.
    """
    for name, kind in BEAT.items():
        if not isinstance(beat[name], kind):
            raise TypeError(f"{name} of a beat is no {kind.__name__}")
    return beat


def follows_from_loss(error: BaseException) -> bool:
    """True if an exception says that another rank is gone. torch has no exception class for this over gloo."""
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in LOST_PEER)


class FoldedLines:
    """Lines of several ranks, each with the ranks that printed it; equal ones are folded into one.

    Args:
        write: called with one line or more; None: they wait until it is set.
    """

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self.write = write
        self._waiting: dict[str, tuple[float, set[int]]] = {}  # line → since when, and who printed it
        self._lock = threading.Lock()

    def add(self, rank: int, line: str) -> None:
        with self._lock:
            _, ranks = self._waiting.setdefault(line, (time.monotonic(), set()))
            ranks.add(rank)

    def flush(self, *, at_once: bool = False) -> None:
        """Write the lines that have waited for other ranks."""
        if self.write is None:
            return
        until = time.monotonic()
        if not at_once:
            until -= FOLD_SECONDS
        ready = []
        with self._lock:
            for line, (at, ranks) in list(self._waiting.items()):
                if at <= until:
                    del self._waiting[line]
                    ready.append(f"[{span_of(ranks)}] {line}")
        if ready:
            self.write("\n".join(ready))


def span_of(ranks: Collection[int]) -> str:
    """`rank 2`, `ranks 1-3, 6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"ranks {text}" if len(ranks) > 1 else f"rank {text}"


LAST_WORDS = 30.0  # seconds that rank 0 has to end the run after an error of this rank
# of a message, which is less than `MOST_MESSAGE`
LONGEST_LINE = 1 << 14  # characters
LINES_AT_ONCE = 256
GRACE = 1.0  # seconds that this process outlives rank 0, so that a launcher notices rank 0's end first


class Lifeline:
    """The connection to rank 0, on the other ranks.

    Args:
        address, token: host and port of rank 0's `RankWatch`, and its token.
        timeout: of the placement.
    """

    def __init__(
        self, address: tuple[str, int], token: str, ranks: ProcessRanks, facts: Mapping[str, Any], timeout: float
    ) -> None:
        self.ranks = ranks
        self.timeout = timeout
        connection = socket.create_connection(address, timeout=30)
        connection.sendall(token.encode())
        self._over = threading.Event()
        self.channel = Channel(connection)
        self.channel.send(hello=ranks.rank, host=socket.gethostname(), facts=dict(facts))
        self._thread = threading.Thread(target=self._run, name="proxima-lifeline", daemon=True)
        self._thread.start()

    def report(self, error: BaseException) -> None:
        """Report to rank 0 the error that ends this rank, and wait for rank 0 to print the last message."""
        self.channel.send(error=asdict(RankFailure.of(error)))
        self._thread.join(LAST_WORDS)

    def close(self) -> None:
        """Note that this rank is done, and wait until rank 0 is: a launcher must notice rank 0's exit code first."""
        self._over.set()
        self.channel.send(bye=True)
        self._thread.join()
        with suppress(OSError):
            self.channel.connection.settimeout(LAST_WORDS)
            while self.channel.connection.recv(1 << 16):
                pass
            self.channel.connection.close()

    def _run(self) -> None:
        """Send signs of life, which rank 0 answers; when rank 0 is gone, exit, unless this rank is done."""
        heard = time.monotonic()
        warned = False
        while not self._over.wait(BEAT_SECONDS):
            self.channel.send(beat=self.ranks.status.beat())
            answers = self.channel.receive()
            if answers:
                heard = time.monotonic()
                warned = False
            silent = time.monotonic() - heard
            if answers is None or silent > self.timeout:
                break
            if self.ranks.rank == 1 and silent > silent_seconds(self.timeout) and not warned:
                warned = True
                print(f"rank 0 has not responded for {silent:.0f} s", file=sys.__stderr__, flush=True)
        if not self._over.wait(GRACE):
            os._exit(1)


class ForwardedLines(TextIOBase):
    """A stream whose lines go to rank 0, which writes them to the log."""

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self._rest = ""

    def write(self, text: str) -> int:
        *ended, self._rest = (self._rest + text).split("\n")
        lines = [_cut(line) for line in ended if line.strip()]
        for first in range(0, len(lines), LINES_AT_ONCE):
            self._lifeline.channel.send(lines=lines[first : first + LINES_AT_ONCE])
        return len(text)


def _cut(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[:LONGEST_LINE]}…"


def ignore_signals() -> None:
    """Ignore the signals that a terminal or a launcher sends to all processes: rank 0 handles them, and this process
    ends when rank 0 does."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
