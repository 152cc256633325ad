"""Runs the unit tests of a row against the code of a completion, which runs in a separate process (`code_process`).

Assertions run in a fork of the worker. The names of the code are stand-ins there, which forward calls and get plain
data back. A result is therefore compared by Python's own `==`, and no code of the completion runs in that process.
"""

import builtins
import json
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from proxima.process.code_runner import NONE, run_program, running_code
from proxima.process.entry import prctl
from proxima.process.json_lines import LineChannel
from proxima.process.limits import limit_growth
from proxima.process.plain_data import from_plain, to_plain
from proxima.process.sandbox import Sandbox
from proxima.reward.workers.names_of_tests import Names, import_modules, tests_without_call

ONE_BY_ONE = 64  # items of an iterator that come one by one
MOST_ITEMS = 1024  # that come at once, later
LINE_BYTES = 16 << 20  # of a reply
PR_SET_DUMPABLE = 4  # controls whether other processes may read this one's memory
PR_CAPBSET_DROP = 24
CAP_SYS_PTRACE = 19  # the capability with which root's programs can read it anyway
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

    def ask(self, do: str, *arguments: object, **named: object) -> Any:
        """Run an operation of `code_process` and return its value; raises the exception that it raised in the code."""
        encoded = {name: to_plain(argument, self._reference) for name, argument in named.items()}
        return self._send(do, arguments, [to_plain(argument, self._reference) for argument in arguments], encoded)

    def _send(self, do: str, arguments: Sequence[Any], encoded: Sequence[Any], named: Mapping[str, Any]) -> Any:
        request = {"id": secrets.token_hex(8), "do": do, "arguments": encoded, "named": named}
        try:
            self._channel.send(request)
            reply = self._line()
            if reply["id"] != request["id"]:
                raise ValueError("a reply to something else")
            if "error" not in reply:
                for argument, after in zip(arguments[1:], reply["after"], strict=True):
                    _change(argument, from_plain(after, self._object))
                return from_plain(reply["value"], self._object)
            raised = _raised(reply["error"], from_plain(["list", reply["arguments"]], self._object))
        except (ArithmeticError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
            self.broken = True
            raise BrokenCode from error
        raise raised from CodeRaised()

    def _line(self) -> Any:
        try:
            return self._channel.receive()
        except (EOFError, OSError, RecursionError, ValueError) as error:
            self.broken = True
            raise BrokenCode from error

    def _object(self, tag: str, inside: Any) -> "Remote":
        if tag == "iterator":
            return RemoteIterator(self, int(inside))
        return RemoteObject(self, int(inside))

    def _reference(self, value: object) -> Any:
        """The reference sent for an object that is not plain data: an object of the code, or of the row's setup."""
        if isinstance(value, Remote):
            return ["object", value._Remote__number]
        if id(value) in self.given:
            return ["name", self.given[id(value)]]
        raise RowError(
            f"they pass a {type(value).__name__} to the code, or compare it with one; only plain data is supported"
        )


class CodeRaised(Exception):
    """Marks an exception that was raised by the code, not by the tests."""


# What code may raise in the tests: StopIteration would end their own iterators, as if it were no error (PEP 479), and
# others can't be made of a message.
_NOT_RAISED = (StopIteration, StopAsyncIteration, UnicodeError, ExceptionGroup)
RAISED = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NOT_RAISED)
}


def _raised(names: Sequence[str], arguments: Sequence[Any]) -> Exception:
    """A new exception of the first type that code may raise, of an exception's own type and its bases."""
    if names and names[0] in ("StopIteration", "StopAsyncIteration"):
        return RuntimeError(f"the code raised {names[0]}")
    kind = next((RAISED[name] for name in names if name in RAISED), RuntimeError)
    if kind is Exception and len(names) > 1:  # such as a group
        kind = RuntimeError
    return kind(*arguments)


class Remote:
    """Stand-in for an object of the code: a function, class or instance. Equal to itself and to no plain data.

    It answers to no special name but those that its classes define; so no library finds an array, a number or a class
    in it.
    """

    __slots__ = ("__code", "__number")

    def __init__(self, code: Code, number: int) -> None:
        object.__setattr__(self, "_Remote__code", code)
        object.__setattr__(self, "_Remote__number", number)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self.__code.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        _refuse_special(name)
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        _refuse_special(name)
        self._ask("setattr", name, value)

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return str(self._expect(str, "str"))

    def __repr__(self) -> str:
        return str(self._expect(str, "repr"))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return bool(self.__number == other.__number)
        to_plain(other, self.__code._reference)  # RowError where the comparison would need the code's own `__eq__`
        return False

    def __hash__(self) -> int:
        return hash(self.__number)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("an object of the code can't be copied")

    def _ask(self, do: str, *arguments: object) -> Any:
        return self.__code.ask(do, self, *arguments)

    def _expect(self, kind: type, do: str) -> Any:
        """The answer of the code, of exactly this type."""
        answer = self._ask(do)
        if type(answer) is not kind:
            raise TypeError(f"the code's {do} is a {type(answer).__name__}")
        return answer


class RemoteObject(Remote):
    """Stand-in for an object that is no iterator."""

    __slots__ = ()

    def __getitem__(self, key: object) -> Any:
        return self._ask("getitem", key)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("iter")
        if isinstance(iterator, RemoteIterator):
            return iterator
        raise TypeError("the code's iter() is no iterator")

    def __len__(self) -> int:
        return int(self._expect(int, "len"))


class RemoteIterator(Remote):
    """Stand-in for an iterator. Its items come one by one at first, so that an endless one is not run ahead of the
    tests, and later as many at once as the code makes in a moment."""

    __slots__ = ("__ended", "__items", "__seen")

    def __init__(self, code: Code, number: int) -> None:
        super().__init__(code, number)
        object.__setattr__(self, "_RemoteIterator__items", deque())
        object.__setattr__(self, "_RemoteIterator__seen", 0)
        object.__setattr__(self, "_RemoteIterator__ended", False)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.__items and not self.__ended:
            most = 1 if self.__seen < ONE_BY_ONE else MOST_ITEMS
            ended, items = self._ask("next", most)
            if type(ended) is not bool or type(items) is not list or not (items or ended):
                raise TypeError("the code's next() is no list of items")
            object.__setattr__(self, "_RemoteIterator__ended", ended)
            object.__setattr__(self, "_RemoteIterator__seen", self.__seen + len(items))
            self.__items.extend(items)
        if self.__items:
            return self.__items.popleft()
        raise StopIteration


def _refuse_special(name: str) -> None:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(f"an object of the code has no {name} for the tests")


def _change(argument: Any, after: Any) -> None:
    """Update an argument of the tests in place with the changes that the code made to its copy."""
    if type(argument) is not type(after):
        return
    if type(argument).__name__ == "ndarray":
        if argument.shape == after.shape and argument.flags.writeable:
            argument[...] = after
        return
    try:
        same = argument == after
    except ValueError:  # arrays in them
        same = False
    if not same:
        if isinstance(argument, list):
            argument[:] = after
        elif isinstance(argument, dict | set):
            argument.clear()
            argument.update(after)
        elif isinstance(argument, bytearray):
            argument[:] = after
        elif isinstance(argument, deque):
            argument.clear()
            argument.extend(after)


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
    deadline = time.monotonic() + seconds
    limits = (int(seconds) + 1, memory_mb)
    if "programs" in tests:
        return _run_programs(code, setup, limits, tests["programs"], deadline, sandbox)
    with running_code(code, setup, limits, sandbox=sandbox) as channel:
        module = Code(channel)
        verdicts, timed_out, killed = _in_fork(
            lambda: _verdicts(module, tests, setup, entry_point), deadline, memory_mb
        )
    if any(isinstance(verdict, str) for verdict in verdicts):
        raise ValueError(f"the tests of this row can't be run: {verdicts[-1]}")
    cases = tests["calls"]["inputs"] if "calls" in tests else tests["assertions"]
    count = len(cases)
    if len(verdicts) != 1 + count and not (timed_out or killed) and verdicts != [False]:
        raise ValueError("the tests of this row can't be run: they end their own process")
    return {"runs": verdicts[:1] == [True], "passed": sum(verdicts[1:]) / count, "timed_out": timed_out}


def _in_fork(
    verdicts: Callable[[], Iterable[bool | str]], deadline: float, memory_mb: int
) -> tuple[list[Any], bool, bool]:
    """The values that the function yields in a fork of this process until the deadline, True if the deadline passed,
    and True if a signal killed the fork: no test sends one, so the code did, or it needed too much memory."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            limit_growth("AS", 0, memory_mb)  # a value of the code may make the tests need any memory
            for verdict in verdicts():
                os.write(send, json.dumps(verdict).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(send)
    data = b""
    part = b"?"
    status = 0
    try:
        while part and select.select([receive], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(receive, 1 << 16)
            data += part
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
            ready = None
            if "calls" in tests:
                ready = _calls(code, tests["calls"])
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
    read = Names(sources, names)
    own = {name for name in read.modules if name not in names}
    try:
        names.update(import_modules({name: read.modules[name] for name in own}))
    except ImportError as error:
        raise RowError(f"they need a package: {error}") from error
    wanted = read.of_code() & defined if entry_point is None else set()
    for name in sorted(wanted):
        with suppress(Exception):  # if its value can't be sent, the tests see the name as undefined
            names[name] = code.value(name)

    def run(source: str) -> None:
        before = set(map(id, names.values()))
        exec(compile(source, "tests", "exec", dont_inherit=True, optimize=0), names)
        if entry_point is None:
            for name in tests_without_call(source):
                names[name]()
        elif "check" in names:
            names["check"](code.value(entry_point))
        else:
            raise RowError("they define no function check(candidate), which entry_point asks for")
        cases = [value for value in names.values() if isinstance(value, type) and id(value) not in before]
        _run_cases(cases)

    return [partial(run, source) for source in sources]


def _run_cases(classes: Sequence[type]) -> None:
    """Run the tests of the classes of `unittest` among these; AssertionError if one fails, or there are none in one."""
    if "unittest" not in sys.modules:
        return
    import unittest

    for case in classes:
        if issubclass(case, unittest.TestCase) and case.__module__ == "tests":
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
            assert result.testsRun > len(result.skipped) and result.wasSuccessful()


def _calls(code: Code, calls: Mapping[str, Any]) -> list[Test]:
    """A test for each call of a function, which is `Solution().NAME` if the code defines no such name itself. The
    expected value may be wrapped in a list, and tuples count as lists."""

    def run(arguments: Sequence[Any], expected: object) -> None:
        try:
            function = code.value(calls["name"])
        except KeyError:
            function = getattr(code.value("Solution")(), calls["name"])
        result = _listed(function(*arguments))
        assert result == expected or (isinstance(expected, list) and len(expected) == 1 and result == expected[0])

    return [partial(run, *pair) for pair in zip(calls["inputs"], calls["outputs"], strict=True)]


def _listed(value: object) -> Any:
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return value


def _run_programs(
    code: str, setup: str, limits: Sequence[int], programs: Sequence[Sequence[str]], deadline: float, sandbox: Sandbox
) -> dict[str, Any]:
    """Run the code once for each standard input."""
    passed = 0
    timed_out = False
    for given, expected in programs:
        left = deadline - time.monotonic()
        ended, output = run_program(code, limits, left, setup=setup, given=given, sandbox=sandbox)
        timed_out |= ended is None
        passed += ended == 0 and _lines(output) == _lines(expected)
    return {"runs": True, "passed": passed / len(programs), "timed_out": timed_out}


def _lines(text: str) -> list[str]:
    """The lines without trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
