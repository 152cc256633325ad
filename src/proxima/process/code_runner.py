"""Runs code that a model wrote in a process of its own, `code_process`."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from proxima.process.children import ONE_THREAD, Child, start_module, wait_for
from proxima.process.json_lines import LineChannel
from proxima.process.sandbox import Sandbox

NONE = Sandbox()


@dataclass(frozen=True)
class _CodeProcess:
    """A process that waits for code, with the files that are its standard input and output."""

    child: Child
    stdin: IO[bytes]
    output: IO[bytes]
    resources: ExitStack

    @classmethod
    def start(cls, kind: str, limits: tuple[int, ...], sandbox: Sandbox, errors: bool) -> "_CodeProcess":
        with ExitStack() as resources:
            folder, options = "/tmp", dict[str, Any]()
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


_ahead: dict[Any, _CodeProcess] = {}  # by their arguments: processes that wait for code, each for one


@contextmanager
def _running(
    code: str, setup: str, limits: Sequence[int], kind: str, sandbox: Sandbox, given: str = "", errors: bool = False
) -> Iterator[_CodeProcess]:
    arguments = kind, tuple(limits), sandbox, errors
    process = _ahead.pop(arguments, None)
    if process is not None and process.child.process.poll() is not None:
        process.resources.close()
        process = None
    process = process or _CodeProcess.start(*arguments)
    with process.resources:
        process.stdin.write(given.encode("utf-8", "replace"))
        process.stdin.seek(0)
        with suppress(OSError):  # it has ended; the caller finds out
            LineChannel(process.child.channel).send([setup, code])
        if sandbox.ahead:
            with suppress(OSError):  # the next call tries again, and reports it
                _ahead[arguments] = _CodeProcess.start(*arguments)
        yield process


@contextmanager
def running_code(
    code: str, setup: str, limits: Sequence[int], kind: str = "module", sandbox: Sandbox = NONE
) -> Iterator[Child]:
    """A process of the code, in a folder and a session of its own and without this process's environment. It is killed
    at the end, with all that it started.

    Args:
        code, setup: Python; `setup` runs first.
        limits: seconds of CPU time, and MiB of address space.
        kind: `module` or `program`, see `code_process`.
        sandbox: its /tmp is the folder, unless its kind is `none`.
    """
    with _running(code, setup, limits, kind, sandbox) as process:
        yield process.child


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
        ended = wait_for(process.child.process, seconds)
        process.child.end()  # what it started may still write
        process.output.seek(0)
        return None if ended is None else sandbox.exit_code(ended), process.output.read().decode("utf-8", "replace")
