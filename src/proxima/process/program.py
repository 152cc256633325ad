"""A program that exchanges lines of JSON with us over its standard input and output, or answers requests in them."""

import json
import shutil
import signal
import socket
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import IO, Any

from proxima.process.children import ENDS_WITH_US, Child, kill_group, start_module, wait_or_kill
from proxima.process.exit_status import describe_exit, of_program
from proxima.process.json_lines import parse_line

LINE_BYTES = 1 << 24  # maximum of a message
LONGEST_REASON = 1000  # characters of what a program says of an error
EXIT_SECONDS = 10.0  # between the end of its output and its own, on a busy machine
UNKNOWN = {"error": {"code": -32601, "message": "not supported"}}


class ProgramFailed(Exception):
    """A program, or a call that it ran, failed."""


def line_of(message: Mapping[str, Any]) -> bytes:
    """The line of a message."""
    return json.dumps(message).encode() + b"\n"


class Program:
    """A running program, which is killed with all that it started when this object or this process ends.

    Args:
        command: program and arguments.
        name: in messages; empty: the program's.
        guarded: under `guardian`, so that processes which it starts in sessions of their own end with it, too.
    Raises: ProgramFailed: it can't be started.
    """

    def __init__(self, command: Sequence[str], name: str = "", *, guarded: bool = False) -> None:
        self.name = name or command[0]
        self._last_errors: deque[str] = deque(maxlen=1)
        self._numbers = count(1)
        self._process: subprocess.Popen[bytes]
        self._channel: socket.socket | None
        if guarded and shutil.which(command[0]) is None:
            raise ProgramFailed(f"{self.name} can't be started: {command[0]} is not a program")
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            if guarded:
                guardian = start_module("proxima.process.guardian", 0, *command, flag="-I", **pipes)
                self._process = guardian.process
                self._channel = guardian.channel
            else:
                self._process = subprocess.Popen(command, **pipes, **ENDS_WITH_US)
                self._channel = None
        except OSError as error:
            raise ProgramFailed(f"{self.name} can't be started: {error.strerror}") from None
        self._end = weakref.finalize(self, _ended, self._process, self._channel)
        self._errors = threading.Thread(
            target=keep_last, args=(self._process.stderr, self._last_errors), daemon=True
        )  # this object must not be one of its arguments: it would live as long as the thread
        self._errors.start()

    @property
    def alive(self) -> bool:
        """True if the program is running."""
        return self._process.poll() is None

    def write(self, message: Mapping[str, Any]) -> None:
        """Send a line. If the program has ended, `read` reports it, not this call."""
        self.write_line(line_of(message))

    def write_line(self, line: bytes) -> None:
        """As `write`, a `line_of` a message."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Wait for the next message.

        Raises: ProgramFailed: the program ended, or wrote a line that is not a JSON object.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline(LINE_BYTES)
        with suppress(ValueError):
            message = parse_line(line)
            if isinstance(message, dict):
                return message
        if line:
            text = line[:200].decode(errors="replace")[:80]
            raise ProgramFailed(f"{self.name} wrote something that is not a message: {text!r}")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        self._errors.join(EXIT_SECONDS)
        code = self._process.returncode
        if self._channel is not None and code is not None:
            code = of_program(code)  # as the guardian says it
        if code is None:
            how = "closed its output"
        else:
            how = f"ended with {describe_exit(code)}"
        raise ProgramFailed(": ".join([f"{self.name} {how}", *self._last_errors]))

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a request of JSON-RPC 2.0, and return its result. Notifications that arrive in between are skipped; the
        program's own requests are refused, except for a ping.

        Raises: ProgramFailed: as `read`, or the answer is an error.
        """
        number = next(self._numbers)
        self.write({"jsonrpc": "2.0", "id": number, "method": method, "params": parameters})
        while True:
            message = self.read()
            if "method" in message:
                if "id" in message:
                    answer = {"result": {}} if message["method"] == "ping" else UNKNOWN
                    self.write({"jsonrpc": "2.0", "id": message["id"], **answer})
            elif message.get("id") == number:
                if "error" in message:
                    error = message["error"]
                    if isinstance(error, dict):
                        said = error.get("message")
                    else:
                        said = error
                    raise ProgramFailed(f"{method} failed: {str(said)[:LONGEST_REASON]}")
                if "result" not in message:
                    raise ProgramFailed(f"{method} failed: the answer has neither a result nor an error")
                return message["result"]

    def kill(self) -> None:
        """Kill the program and all that it started; a thread that waits in `read` then gets ProgramFailed."""
        if self._channel is None:
            kill_group(self._process.pid)
        else:
            self._channel.close()
            self._process.send_signal(signal.SIGCONT)  # the program may have stopped its guardian


def keep_last(stream: IO[bytes], last: deque[str]) -> None:
    """Read a stream to its end and keep its last lines, as many as `last` takes."""
    while line := stream.readline(LINE_BYTES):
        text = line.decode(errors="replace").strip()[:200]
        if text:
            last.append(text)
    stream.close()


def _ended(process: "subprocess.Popen[bytes]", channel: socket.socket | None) -> None:
    if channel is None:
        wait_or_kill(process)
    else:
        Child(process, channel).end(EXIT_SECONDS)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
