"""Runs code that a model wrote in a process of its own, `code_process`."""

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proxima.process.children import ONE_THREAD, Child, start_module


@contextmanager
def running_code(code: str, setup: str, limits: Sequence[int], kind: str = "module", **streams: Any) -> Iterator[Child]:
    """A process of the code, in a folder and a session of its own and without this process's environment. It is killed
    at the end, with all that it started.

    Args:
        code, setup: Python; `setup` runs first.
        limits: seconds of CPU time, and MiB of address space.
        kind: `module` or `program`, see `code_process`.
        streams: standard streams, as of `start_module`.
    """
    with tempfile.TemporaryDirectory(prefix="proxima-code-", ignore_cleanup_errors=True) as folder:
        for name, text in (("setup.py", setup), ("solution.py", code)):
            Path(folder, name).write_text(text, encoding="utf-8", errors="replace")
        environment = {"LANG": "C.UTF-8", **ONE_THREAD, "HOME": folder, "TMPDIR": folder}
        child = start_module(
            "proxima.process.code_process", kind, *limits, flag="-I", cwd=folder, env=environment, **streams
        )
        try:
            yield child
        finally:
            child.end()


def run_program(
    code: str, limits: Sequence[int], seconds: float, *, setup: str = "", given: str = "", errors: bool = False
) -> tuple[int | None, str]:
    """Run the code as a program within `seconds`; return its exit code, None if the time was up, and its output.

    Args:
        code, setup, limits: see `running_code`.
        given: its standard input.
        errors: the output has what it writes to its standard error, too.
    """
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:  # files, so that output has a limit
        stdin.write(given.encode("utf-8", "replace"))
        stdin.seek(0)
        stderr = subprocess.STDOUT if errors else subprocess.DEVNULL
        with running_code(code, setup, limits, "program", stdin=stdin, stdout=output, stderr=stderr) as child:
            try:
                ended = child.process.wait(max(0.0, seconds))
            except subprocess.TimeoutExpired:
                ended = None
        output.seek(0)
        return ended, output.read().decode("utf-8", "replace")
