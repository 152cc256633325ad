"""Starts and kills the process that runs model-written code, `code_process`."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from proxima.data import code_process

VARIABLES = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def start_code(
    folder: str,
    fd: int,
    limits: Sequence[int],
    stdin: Any = subprocess.DEVNULL,
    stdout: Any = subprocess.DEVNULL,
    stderr: Any = subprocess.DEVNULL,
) -> "subprocess.Popen[bytes]":
    """Start the code in `folder` in a new session, without this process's environment. `limits` are seconds and MiB;
    `fd` is as in `code_process`."""
    return subprocess.Popen(
        [sys.executable, "-I", code_process.__file__, str(fd), *map(str, limits)],
        cwd=folder,
        env={**VARIABLES, "HOME": folder, "TMPDIR": folder},
        pass_fds=[fd] if fd >= 0 else [],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its whole group, unless its exit was already collected."""
    if process.returncode is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
