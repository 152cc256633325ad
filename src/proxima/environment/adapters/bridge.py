"""A subprocess that exchanges lines of JSON with us, and one that runs a library's environments in its interpreter."""

import ctypes
import json
import os
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("bridge_process.py")
LINE_BYTES = 1 << 24  # maximum of an answer
_libc = ctypes.CDLL(None)


class ProgramFailed(Exception):
    """A program, or a call that it ran, failed, and so does the episode. The model does not see this error."""


class Program:
    """A running program, which is killed when this object or this process ends.

    Raises: ProgramFailed: it can't be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = tuple(command)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise ProgramFailed(f"{command[0]} can't be started: {error.strerror}") from None
        self._end = weakref.finalize(self, _ended, self._process)

    @property
    def alive(self) -> bool:
        """True if the program is running."""
        return self._process.poll() is None

    def write(self, message: Mapping[str, Any]) -> None:
        """Send a line. If the program has ended, `read` reports it, not this call."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Read the next message.

        Raises: ProgramFailed: the program ended, or wrote a line that is not a JSON object.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline(LINE_BYTES)
        with suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict):
                return message
        if line:
            raise ProgramFailed(
                f"{self.command[0]} wrote something that is not a message: {line.decode(errors='replace')[:80]!r}"
            )
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        raise ProgramFailed(f"{self.command[0]} ended with exit code {self._process.returncode}{self._said()}")

    def _said(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines else ""


class Bridge:
    """A client of a library, in the interpreter that has the library; see `bridge_process`. Within a worker, all
    clients of the same interpreter and library share a process.

    Args:
        python: the interpreter.
        library: a key of `LIBRARIES` in `bridge_process`.
        arguments: arguments of the client.
    """

    _programs: dict[tuple[str, str], Program] = {}  # noqa: RUF012
    _numbers = count()

    def __init__(self, python: str, library: str, **arguments: Any) -> None:
        key = (python, library)
        program = self._programs.get(key)
        if program is None or not program.alive:
            program = self._programs[key] = Program((python, str(SCRIPT), library))
        self._program, self._number = program, next(self._numbers)
        self.call("make", **arguments)
        weakref.finalize(self, _dropped, program, self._number)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method and return its result.

        Raises: ProgramFailed: the method raised.
        """
        return _asked(self._program, self._number, method, arguments)


def _asked(program: Program, number: int, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    program.write({"number": number, "method": method, "arguments": dict(arguments)})
    answer = program.read()
    if "error" in answer:
        raise ProgramFailed(answer["error"])
    result: dict[str, Any] = answer["result"]
    return result


def _dropped(program: Program, number: int) -> None:
    with suppress(ProgramFailed):
        _asked(program, number, "drop", {})


def _die_with_parent() -> None:
    """Make Linux kill the program when this process ends, however it ends."""
    _libc.prctl(1, signal.SIGKILL)


def _ended(process: "subprocess.Popen[bytes]") -> None:
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
