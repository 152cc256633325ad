"""A client of a library in another interpreter: a subprocess runs it there."""

import weakref
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from proxima.process.program import Program, ProgramFailed

SCRIPT = Path(__file__).with_name("bridge_process.py")


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
