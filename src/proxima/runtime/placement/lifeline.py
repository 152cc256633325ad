"""The connection of a rank to rank 0, for its signs of life, its output lines and its errors. When rank 0 is gone, this
process exits."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from io import TextIOBase
from typing import Any

from proxima.runtime.placement.rank_messages import BEAT_SECONDS, Channel, RankFailure, silent_seconds
from proxima.training.process_ranks import ProcessRanks

LAST_WORDS = 30.0  # seconds that rank 0 has to end the run after an error of this rank
LONGEST_LINE, LINES_AT_ONCE = 1 << 14, 256  # characters, and lines of a message: less than `MOST_MESSAGE`
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
        self.ranks, self.timeout = ranks, timeout
        connection = socket.create_connection(address, timeout=30)
        connection.sendall(token.encode())
        self._over, self.channel = threading.Event(), Channel(connection)
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
        heard, warned = time.monotonic(), False
        while not self._over.wait(BEAT_SECONDS):
            self.channel.send(beat=self.ranks.status.beat())
            answers = self.channel.receive()
            if answers:
                heard, warned = time.monotonic(), False
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
        self._lifeline, self._rest = lifeline, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        lines = [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…" for line in lines if line.strip()]
        for first in range(0, len(lines), LINES_AT_ONCE):
            self._lifeline.channel.send(lines=lines[first : first + LINES_AT_ONCE])
        return len(text)


def obey_rank_zero() -> None:
    """Ignore the signals that a terminal or a launcher sends to all processes: rank 0 handles them, and this process
    ends when rank 0 does."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
