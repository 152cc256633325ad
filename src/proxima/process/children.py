"""Child processes: starts a module in another process, which ends with this one, and kills a group, or all below this
process. Standard library only."""

import ctypes  # noqa: F401  `end_with_parent` needs it, and between a fork and an exec nothing may be imported
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.process import entry
from proxima.process.entry import prctl
from proxima.process.linux_process import children, ends_within

if TYPE_CHECKING:  # few programs run in one
    from proxima.process.sandbox import Sandbox

PR_SET_CHILD_SUBREAPER = 36  # this process becomes the parent of its orphaned descendants
SECONDS = 10.0  # that the kernel may take to end processes
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # variables
START = Path(entry.__file__).resolve()
# Options of `subprocess.Popen` for a program that is not ours: Linux kills it when the thread that started it ends.
ENDS_WITH_US: dict[str, Any] = {"start_new_session": True, "preexec_fn": entry.end_with_parent}


@dataclass(frozen=True)
class Child:
    """A process that runs a module of ours, and the socket to it."""

    process: "subprocess.Popen[bytes]"
    channel: socket.socket
    sandbox: "Sandbox | None" = None

    def end(self, seconds: float = 0.0) -> int:
        """Close the socket, wait `seconds` for the process to end by itself, even if what it runs has stopped it, then
        kill it with its group. Returns its exit code; may be called twice."""
        self.channel.close()
        self.process.send_signal(signal.SIGCONT)
        code = wait_or_kill(self.process, seconds)
        if self.sandbox:
            return self.sandbox.exit_code(code)
        return code


def start_module(
    module: str,
    *arguments: object,
    flag: str = "-P",
    fds: Sequence[int] = (),
    sandbox: "Sandbox | None" = None,
    **options: Any,
) -> Child:
    """Start a module as `__main__` of another process.

    The process is in a session of its own. It ends when the socket is closed or the thread that called this function
    ends, so also when this process does; `entry` has the exceptions. The module finds its end of the socket in
    `sys.argv[1]`.

    Args:
        arguments: `sys.argv[2:]`.
        flag: of the interpreter.
        fds: descriptors that the process inherits.
        sandbox: in which it runs; its exit code is then that of `Sandbox.exit_code`.
        options: of `subprocess.Popen`; standard streams are the null device unless given.
    Raises: OSError: the process can't be started. SandboxMissing.
    """
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            program = [sys.executable, flag, str(START), placed(module), str(theirs.fileno()), *map(str, arguments)]
            in_sandbox = sandbox.command(program) if sandbox else nullcontext((program, ()))
            with in_sandbox as (line, its_fds):
                process = subprocess.Popen(
                    line,
                    pass_fds=(theirs.fileno(), *fds, *its_fds),
                    start_new_session=True,  # Ctrl-C is for the run, which stops the process when it is done
                    **{**streams, **options},
                )
        except BaseException:
            ours.close()
            raise
    return Child(process, ours, sandbox)


def placed(module: str) -> str:
    """The word by which `entry` finds a module: that of another distribution has the folder of its package, which the
    interpreter may not find by itself."""
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    if package == "proxima" or file is None:
        return module
    return f"{module}={Path(file).parent}"


def wait_or_kill(process: "subprocess.Popen[bytes]", seconds: float = 0.0) -> int:
    """Wait `seconds` for a process to end by itself, then kill it and its group. Returns its exit code."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    kill_group(process.pid)
    process.kill()
    return process.wait()


def wait_for(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """Wait at most `seconds` for a process to end; return its exit code, or None. Returns at once when it ends:
    `Popen.wait` looks only every 50 ms."""
    ended = ends_within(process.pid, seconds)
    if ended is not None:
        return process.wait() if ended else None
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads: the process and all that it started, but for those that left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make all descendants of this process, from now on, its children when their parents end."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_children(besides: Set[int] = frozenset()) -> None:
    """Kill every child of this process except those `besides`, then the orphans that this leaves."""
    deadline = time.monotonic() + SECONDS
    while True:
        orphans = children() - besides
        if not orphans or time.monotonic() >= deadline:
            return
        for pid in orphans:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)
