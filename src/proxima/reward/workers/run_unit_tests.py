"""Runs the unit tests of a row against the code of a completion, which runs in a separate process (`code_process`).

Assertions run in a fork of the worker. The names of the code are stand-ins there, which forward calls and get plain
data back. A result is therefore compared by Python's own `==`, and no code of the completion runs in that process.
"""

import ast
import builtins
import json
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from proxima.process.code_runner import NONE, run_program, running_code
from proxima.process.entry import prctl
from proxima.process.json_lines import LineChannel, decode, encode
from proxima.process.sandbox import Sandbox

LINE_BYTES = 16 << 20  # of a reply
PR_SET_DUMPABLE = 4  # controls whether other processes may read this one's memory
PR_CAPBSET_DROP, CAP_SYS_PTRACE = 24, 19  # the capability with which root's programs can read it anyway
Test = Callable[[], object]


class RowError(BaseException):
    """The tests of the row can't be run with any completion. No `except Exception` of a test catches this."""


class BrokenCode(BaseException):
    """The process of the code has exited, or has sent something other than a reply."""


class Code:
    """The running code of a completion.

    Args:
        channel: to its process.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.given: dict[int, str] = {}  # names of the objects that the row's setup defines, in both processes
        self.broken = False
        self._channel = LineChannel(channel, LINE_BYTES)

    def names(self) -> set[str]:
        """The names that the code defines, once it is loaded; BrokenCode if it can't be."""
        names = self._line()
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise BrokenCode
        return set(names)

    def value(self, name: str) -> Any:
        """The value of a name in the code: plain data, or a stand-in."""
        return self._send("value", (), [["name", name]], {})

    def ask(self, do: str, *arguments: Any, **named: Any) -> Any:
        """Run an operation of `code_process` and return its value; raises the exception that it raised in the code."""
        encoded = {name: encode(argument, self._reference) for name, argument in named.items()}
        return self._send(do, arguments, [encode(argument, self._reference) for argument in arguments], encoded)

    def _send(self, do: str, arguments: Sequence[Any], encoded: Sequence[Any], named: Mapping[str, Any]) -> Any:
        request = {"id": secrets.token_hex(8), "do": do, "arguments": encoded, "named": named}
        try:
            self._channel.send(request)
            reply = self._line()
            if reply["id"] != request["id"]:
                raise ValueError("a reply to something else")
            if "error" not in reply:
                for argument, after in zip(arguments[1:], reply["after"], strict=True):
                    _change(argument, decode(after, self._object))
                return decode(reply["value"], self._object)
            kind, message = vars(builtins).get(str(reply["error"])), str(reply["message"])
        except (ArithmeticError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
            self.broken = True
            raise BrokenCode from error
        raisable = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
        raise (kind if raisable else RuntimeError)(message) from CodeRaised()  # type: ignore[misc]

    def _line(self) -> Any:
        try:
            return self._channel.receive()
        except (EOFError, OSError, RecursionError, ValueError) as error:
            self.broken = True
            raise BrokenCode from error

    def _object(self, tag: str, inside: Any) -> "Remote":
        return Remote(self, int(inside))

    def _reference(self, value: Any) -> Any:
        """The reference sent for an object that is not plain data: an object of the code, or of the row's setup."""
        if isinstance(value, Remote):
            return ["object", object.__getattribute__(value, "_number")]
        if id(value) in self.given:
            return ["name", self.given[id(value)]]
        raise RowError(
            f"they pass a {type(value).__name__} to the code, or compare it with one; only plain data is supported"
        )


class CodeRaised(Exception):
    """Marks an exception that was raised by the code, not by the tests."""


class Remote:
    """Stand-in for an object of the code: a function, class or instance. Equal to itself and to no plain data."""

    def __init__(self, code: Code, number: int) -> None:
        object.__setattr__(self, "_code", code)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._code.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._code.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._code.ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._code.ask("getitem", self, key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._code.ask("list", self))

    def __len__(self) -> int:
        return int(self._code.ask("len", self))

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return str(self._code.ask("str", self))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return bool(self._number == other._number)
        encode(other, self._code._reference)  # RowError where the comparison would need the code's own `__eq__`
        return False

    def __hash__(self) -> int:
        return hash(self._number)


def _change(argument: Any, after: Any) -> None:
    """Update an argument of the tests in place with the changes that the code made to its copy."""
    if type(argument) is type(after) and argument != after:
        if isinstance(argument, list):
            argument[:] = after
        elif isinstance(argument, dict | set):
            argument.clear()
            argument.update(after)


def hide_memory() -> None:
    """Prevent child processes from reading the tests in the memory of this process and its forks, even as root."""
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE)


def code_sandbox(kind: str) -> Sandbox:
    """The sandbox in which a worker runs the code of one completion after another, each in a process of its own."""
    return Sandbox(kind=kind, ahead=kind == "bubblewrap")


def run_unit_tests(
    *,
    code: str,
    tests: Mapping[str, Any],
    setup: str,
    entry_point: str | None,
    seconds: float,
    memory_mb: int,
    sandbox: Sandbox = NONE,
) -> dict[str, Any]:
    """Run the `tests` of the row, as returned by `as_tests` of `reward.unit_tests`, against the code within `seconds`.
    ValueError if they can't be run with any code."""
    deadline, limits = time.monotonic() + seconds, (int(seconds) + 1, memory_mb)
    if "programs" in tests:
        return _run_programs(code, setup, limits, tests["programs"], deadline, sandbox)
    with running_code(code, setup, limits, sandbox=sandbox) as channel:
        module = Code(channel)
        verdicts, timed_out, killed = _in_fork(lambda: _verdicts(module, tests, setup, entry_point), deadline)
    if any(isinstance(verdict, str) for verdict in verdicts):
        raise ValueError(f"the tests of this row can't be run: {verdicts[-1]}")
    count = len(tests["calls"]["inputs"] if "calls" in tests else tests["assertions"])
    if len(verdicts) != 1 + count and not (timed_out or killed) and verdicts != [False]:
        raise ValueError("the tests of this row can't be run: they end their own process")
    return {"runs": verdicts[:1] == [True], "passed": sum(verdicts[1:]) / count, "timed_out": timed_out}


def _in_fork(verdicts: Callable[[], Iterable[bool | str]], deadline: float) -> tuple[list[Any], bool, bool]:
    """The values that the function yields in a fork of this process until the deadline, True if the deadline passed,
    and True if a signal killed the fork: no test sends one, so the code did, or it needed too much memory."""
    receive, send = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setsid()
            for verdict in verdicts():
                os.write(send, json.dumps(verdict).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(send)
    data, part, status = b"", b"?", 0
    try:
        while part and select.select([receive], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data += (part := os.read(receive, 1 << 16))
    finally:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(receive)
    return [json.loads(line) for line in data.splitlines()], bool(part), os.WIFSIGNALED(status)


def _verdicts(code: Code, tests: Mapping[str, Any], setup: str, entry_point: str | None) -> Iterator[bool | str]:
    """Yield True if the code can be loaded, then for each test True if it passes; or the problem with the row."""
    try:
        names: dict[str, Any] = {"__name__": "tests"}
        try:
            exec(compile(setup, "setup", "exec", dont_inherit=True, optimize=0), names)
        except Exception as error:
            raise RowError(f"their setup raises {type(error).__name__}: {error}") from error
        code.given = {id(value): name for name, value in names.items()}
        try:
            defined = code.names()
            ready = _calls(code, tests["calls"]) if "calls" in tests else None
            ready = ready or _assertions(code, tests["assertions"], entry_point, names, defined)
        except BrokenCode:
            yield False
            return
        yield True
        for test in ready:
            yield _passes(test) and not code.broken
    except RowError as error:
        yield f"{error}"[:300]


def _passes(test: Test) -> bool:
    try:
        test()
    except RowError:
        raise
    except ImportError as error:
        if isinstance(error.__cause__, CodeRaised):
            return False
        raise RowError(f"they need a package: {error}") from error
    except BaseException:
        return False
    return True


def _assertions(
    code: Code, sources: Sequence[str], entry_point: str | None, names: dict[str, Any], defined: set[str]
) -> list[Test]:
    """A test for each source; with `entry_point` the source defines `check`, which is called with that function."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    read = {node.id for node in nodes if isinstance(node, ast.Name)} - bound - set(names)
    own = {name for name in read if not hasattr(builtins, name)}
    if not own and entry_point is None:  # `assert sum(10, 15) == 6` is about the code's own `sum`
        own = read
    for name in sorted(own & defined):
        with suppress(Exception):  # if its value can't be sent, the tests see the name as undefined
            names[name] = code.value(name)

    def run(source: str) -> None:
        exec(compile(source, "tests", "exec", dont_inherit=True, optimize=0), names)
        if entry_point is not None:
            names["check"](code.value(entry_point))

    return [partial(run, source) for source in sources]


def _calls(code: Code, calls: Mapping[str, Any]) -> list[Test]:
    """A test for each call of a function, which is `Solution().NAME` if the code defines no such name itself. The
    expected value may be wrapped in a list, and tuples count as lists."""

    def run(arguments: Sequence[Any], expected: Any) -> None:
        try:
            function = code.value(calls["name"])
        except KeyError:
            function = getattr(code.value("Solution")(), calls["name"])
        result = _listed(function(*arguments))
        assert result == expected or (isinstance(expected, list) and len(expected) == 1 and result == expected[0])

    return [partial(run, *pair) for pair in zip(calls["inputs"], calls["outputs"], strict=True)]


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def _run_programs(
    code: str, setup: str, limits: Sequence[int], programs: Sequence[Sequence[str]], deadline: float, sandbox: Sandbox
) -> dict[str, Any]:
    """Run the code once for each standard input."""
    passed, timed_out = 0, False
    for given, expected in programs:
        left = deadline - time.monotonic()
        ended, output = run_program(code, limits, left, setup=setup, given=given, sandbox=sandbox)
        timed_out |= ended is None
        passed += ended == 0 and _lines(output) == _lines(expected)
    return {"runs": True, "passed": passed / len(programs), "timed_out": timed_out}


def _lines(text: str) -> list[str]:
    """The lines without trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
