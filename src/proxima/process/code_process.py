"""The process that runs the code from a completion, in a folder of its own, started by `code_runner`. Its arguments are
KIND SECONDS MEMORY_MB; `setup.py` and `solution.py` come through its channel. Standard library only.

It does not know the tests. A `program` reads standard input. The functions of a `module` are called through the
channel: one line of JSON per request, one per reply. So the code can pass a test only by returning the right values;
the tests, their asserts and their builtins are in another process.
"""

import builtins
import operator
import os
import signal
import socket
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from proxima.process.json_lines import LineChannel
from proxima.process.limits import confine, limit
from proxima.process.plain_data import from_plain, to_plain

READ_AHEAD = 0.001  # seconds in which an iterator may be asked for more than one item
FILE_BYTES = 16 << 20  # of a file, and of the standard output
FILES = 64
SOURCES = ("setup.py", "solution.py")
BUILT_IN = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)}
_raised: dict[int, Exception] = {}  # by the iterator's id: what it raised after items that were sent before


def next_items(iterator: Any, most: int) -> list[Any]:
    """Up to `most` items of an iterator, as many as come quickly, after True if it has ended."""
    if id(iterator) in _raised:
        raise _raised.pop(id(iterator))
    items: list[Any] = []
    until = monotonic() + READ_AHEAD
    while len(items) < most:
        try:
            items.append(next(iterator))
        except StopIteration:
            return [True, items]
        except Exception as error:
            if not items:
                raise
            _raised[id(iterator)] = error
            break
        if monotonic() > until:
            break
    return [False, items]


OPERATIONS: dict[str, Callable[..., Any]] = {
    "value": lambda value: value,
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "iter": iter,
    "next": next_items,
    "len": len,
    "str": str,
    "repr": repr,
}


def limit_process(seconds: int, memory_mb: int) -> None:
    """Set the limits of this process, and confine it to its folder."""
    limit("AS", memory_mb << 20)
    limit("CPU", seconds)
    limit("FSIZE", FILE_BYTES)
    limit("NOFILE", FILES)
    limit("NPROC", 0)  # counts threads too; the kernel does not apply it to root
    limit("CORE", 0)
    sys.modules["_posixsubprocess"] = None  # type: ignore[assignment]  # its import fails
    if hasattr(signal, "pidfd_send_signal"):
        del signal.pidfd_send_signal  # no audit event
    confine("code under test", os.getcwd())


def receive_files(channel: LineChannel) -> None:
    """Write the files of the code, which the first message holds, into the folder."""
    for name, text in zip(SOURCES, channel.receive(), strict=True):
        with open(name, "w", encoding="utf-8", errors="replace") as stream:
            stream.write(text)


def run_files(name: str) -> dict[str, Any]:
    """Run `setup.py` and `solution.py` as one module and return the names that they define."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["solution.py"]
    for file in SOURCES:
        with open(file, encoding="utf-8") as stream:
            source = stream.read()
        exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    return vars(module)


def show_error(kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
    """Print an exception as Python does, without the frames above the code's own."""
    while frames is not None and frames.tb_frame.f_code.co_filename not in SOURCES:
        frames = frames.tb_next
    sys.__excepthook__(kind, error.with_traceback(frames), frames)


def error_arguments(error: BaseException) -> list[Any]:
    """The arguments of an exception if they are short plain values, else its message."""
    plain = len(error.args) <= 2 and all(type(each) in (str, int, float) for each in error.args)
    arguments = list(error.args) if plain else [str(error)]
    for i, argument in enumerate(arguments):
        if type(argument) is str:
            arguments[i] = argument[:300]
    return arguments


def serve_objects(channel: LineChannel) -> None:
    """Load the code, then apply operations to its objects until the socket closes."""
    kept: dict[int, Any] = {}

    def keep(value: Any) -> Any:
        kept[id(value)] = value
        kind = "iterator" if hasattr(type(value), "__next__") else "object"
        return [kind, id(value)]

    def take(tag: str, inside: Any) -> Any:
        return names[inside] if tag == "name" else kept[inside]

    def reply(request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            arguments = [from_plain(argument, take) for argument in request["arguments"]]
            named = {name: from_plain(argument, take) for name, argument in request["named"].items()}
            value = OPERATIONS[request["do"]](*arguments, **named)
            return {"value": to_plain(value, keep), "after": [to_plain(argument, keep) for argument in arguments[1:]]}
        except BaseException as error:
            return {"error": [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in BUILT_IN],
                    "arguments": error_arguments(error)}  # fmt: skip

    names = run_files("solution")
    known = vars(builtins)
    defined = sorted(name for name, value in names.items() if name not in known or value is not known[name])
    channel.send(defined)
    with suppress(EOFError):
        while True:
            request = channel.receive()
            channel.send({"id": request["id"], **reply(request)})


def run_code(kind: str, limits: Sequence[int], channel: LineChannel) -> None:
    """Receive the code and run it under its limits, in this process from now on."""
    receive_files(channel)
    limit_process(*limits)
    sys.excepthook = show_error
    if kind == "program":
        channel.connection.close()
        run_files("__main__")
    else:
        serve_objects(channel)


if __name__ == "__main__":
    kind, *numbers = sys.argv[2:]
    run_code(kind, list(map(int, numbers)), LineChannel(socket.socket(fileno=int(sys.argv[1]))))
