"""Runs code that a model wrote in a process of its own, `code_process`."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from proxima.process.children import ONE_THREAD, Child, start_module
from proxima.process.json_lines import LineChannel
from proxima.process.sandbox import Sandbox

NONE = Sandbox()


@contextmanager
def running_code(
    code: str, setup: str, limits: Sequence[int], kind: str = "module", sandbox: Sandbox = NONE, **streams: Any
) -> Iterator[Child]:
    """A process of the code, in a folder and a session of its own and without this process's environment. It is killed
    at the end, with all that it started.

    Args:
        code, setup: Python; `setup` runs first.
        limits: seconds of CPU time, and MiB of address space.
        kind: `module` or `program`, see `code_process`.
        sandbox: its /tmp is the folder, unless its kind is `none`.
        streams: standard streams, as of `start_module`.
    """
    with ExitStack() as stack:
        folder = "/tmp"
        if sandbox.kind == "none":
            folder = stack.enter_context(TemporaryDirectory(prefix="proxima-code-", ignore_cleanup_errors=True))
            streams["cwd"] = folder
        environment = {"LANG": "C.UTF-8", **ONE_THREAD, "HOME": folder, "TMPDIR": folder}
        module = "proxima.process.code_process"
        child = start_module(module, kind, *limits, flag="-I", env=environment, sandbox=sandbox, **streams)
        stack.callback(child.end)
        with suppress(OSError):  # it has ended; the caller finds out
            LineChannel(child.channel).send([setup, code])
        yield child


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
    with TemporaryFile() as stdin, TemporaryFile() as output:  # files, so that output has a limit
        stdin.write(given.encode("utf-8", "replace"))
        stdin.seek(0)
        stderr = subprocess.STDOUT if errors else subprocess.DEVNULL
        streams = {"stdin": stdin, "stdout": output, "stderr": stderr}
        with running_code(code, setup, limits, "program", sandbox, **streams) as child:
            try:
                ended = sandbox.exit_code(child.process.wait(max(0.0, seconds)))
            except subprocess.TimeoutExpired:
                ended = None
        output.seek(0)
        return ended, output.read().decode("utf-8", "replace")
