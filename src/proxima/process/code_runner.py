"""Runs code that a model wrote in a process of its own, `code_process`."""

import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from proxima.process.children import ONE_THREAD, Child, start_module, wait_for
from proxima.process.json_lines import LineChannel
from proxima.process.sandbox import OWN_CHOICES, Sandbox

NONE = Sandbox()
LIVE_SECONDS = 60.0  # that the server of code may take to start or kill a process, on a busy machine
_servers: dict[str, str] = {}  # by the kind of sandbox: the socket of the servers of its code


def run_by_servers(kind: str, address: str) -> None:
    """Run the code of sandboxes of this kind by the servers of this socket, `sandbox.CodeServers`."""
    _servers[kind] = address


@dataclass(frozen=True)
class _CodeProcess:
    """A process that waits for code, with the files that are its standard input and output."""

    child: Child
    stdin: IO[bytes]
    output: IO[bytes]
    resources: ExitStack

    @property
    def channel(self) -> socket.socket:
        return self.child.channel

    @classmethod
    def start(cls, kind: str, limits: tuple[int, ...], sandbox: Sandbox, errors: bool) -> "_CodeProcess":
        with ExitStack() as resources:
            folder = "/tmp"
            options = dict[str, Any]()
            if sandbox.kind == "none":
                folder = resources.enter_context(TemporaryDirectory(prefix="proxima-code-", ignore_cleanup_errors=True))
                options["cwd"] = folder
            stdin, output = (resources.enter_context(TemporaryFile()) for _ in range(2))  # files: output has a limit
            if kind == "program":
                stderr = subprocess.STDOUT if errors else subprocess.DEVNULL
                options |= {"stdin": stdin, "stdout": output, "stderr": stderr}
            variables = {"LANG": "C.UTF-8", **ONE_THREAD, "HOME": folder, "TMPDIR": folder}
            module = "proxima.process.code_process"
            child = start_module(module, kind, *limits, flag="-I", env=variables, sandbox=sandbox, **options)
            resources.callback(child.end)
            return cls(child, stdin, output, resources.pop_all())

    @property
    def waits(self) -> bool:
        """True unless it has ended."""
        return self.child.process.poll() is None

    def wait(self, seconds: float) -> int | None:
        """Wait at most `seconds` for its end; return its exit code, or None."""
        code = wait_for(self.child.process, seconds)
        if code is None or self.child.sandbox is None:
            return None
        return self.child.sandbox.exit_code(code)

    def end(self) -> None:
        """Kill it, with all that it started."""
        self.child.end()


@dataclass
class _ServedCode:
    """A process of a server of code, as `_CodeProcess`; `connection` is to the server, on which one is asked for: KIND,
    limits, and whether errors are printed, as a line of JSON with three descriptors, which become the channel, the
    standard input and the output of `code_process`. The reply is its exit code; the server kills it when this side is
    closed."""

    channel: socket.socket
    connection: LineChannel
    stdin: IO[bytes]
    output: IO[bytes]
    resources: ExitStack
    waits: bool = False
    code: int | None = None

    @classmethod
    def start(cls, kind: str, limits: tuple[int, ...], sandbox: Sandbox, errors: bool) -> "_ServedCode":
        with ExitStack() as resources:
            stdin, output = (resources.enter_context(TemporaryFile()) for _ in range(2))
            connection = resources.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(LIVE_SECONDS)
            connection.connect(_servers.get(sandbox.kind, ""))
            ours, theirs = socket.socketpair()
            resources.enter_context(ours)
            with theirs:
                files = [stream.fileno() for stream in (stdin, output)]
                LineChannel(connection).send([kind, limits, errors], [theirs.fileno(), *files])
            made = cls(ours, LineChannel(connection), stdin, output, resources.pop_all())
            made.resources.callback(made.end)
            return made

    def wait(self, seconds: float) -> int | None:
        """See `_CodeProcess.wait`; a process whose server is gone has ended by SIGKILL."""
        if self.code is None:
            try:
                self.code = int(self.connection.receive(time.monotonic() + seconds))
            except TimeoutError:
                return None
            except (EOFError, OSError):
                self.code = -signal.SIGKILL
        return self.code

    def end(self) -> None:
        """See `_CodeProcess.end`."""
        with suppress(OSError):
            self.connection.connection.shutdown(socket.SHUT_WR)
        self.wait(LIVE_SECONDS)


_ahead: dict[Any, _CodeProcess | _ServedCode] = {}  # by their arguments: processes that wait for code, each for one


@contextmanager
def _running(
    code: str, setup: str, limits: Sequence[int], kind: str, sandbox: Sandbox, given: str = "", errors: bool = False
) -> Iterator[_CodeProcess | _ServedCode]:
    start = _CodeProcess.start if sandbox.kind in OWN_CHOICES else _ServedCode.start
    arguments = kind, tuple(limits), sandbox, errors
    process = _ahead.pop(arguments, None)
    if process is not None and not process.waits:
        process.resources.close()
        process = None
    process = process or start(*arguments)
    with process.resources:
        process.stdin.write(given.encode("utf-8", "replace"))
        process.stdin.seek(0)
        with suppress(OSError):  # it has ended; the caller finds out
            LineChannel(process.channel).send([setup, code])
        if sandbox.ahead:
            with suppress(OSError):  # the next call tries again, and reports it
                _ahead[arguments] = start(*arguments)
        yield process


@contextmanager
def running_code(
    code: str, setup: str, limits: Sequence[int], kind: str = "module", sandbox: Sandbox = NONE
) -> Iterator[socket.socket]:
    """The channel of a process of the code, in a folder and a session of its own and without this process's
    environment. It is killed at the end, with all that it started.

    Args:
        code, setup: Python; `setup` runs first.
        limits: seconds of CPU time, and MiB of address space.
        kind: `module` or `program`, see `code_process`.
        sandbox: its /tmp is the folder, unless its kind is `none`.
    """
    with _running(code, setup, limits, kind, sandbox) as process:
        yield process.channel


def run_program(
    code: str,
    limits: Sequence[int],
    seconds: float,
    *,
    setup: str = "",
    given: str = "",
    errors: bool = False,
    sandbox: Sandbox = NONE,
) -> tuple[int | None, str]:
    """Run the code as a program within `seconds`; return its exit code, None if the time was up, and its output.

    Args:
        code, setup, limits, sandbox: see `running_code`.
        given: its standard input.
        errors: the output has what it writes to its standard error, too.
    """
    with _running(code, setup, limits, "program", sandbox, given, errors) as process:
        ended = process.wait(seconds)
        process.end()  # what it started may still write
        process.output.seek(0)
        return ended, process.output.read().decode("utf-8", "replace")
