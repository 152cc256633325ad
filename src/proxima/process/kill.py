"""Ends processes: a group, or all below this one. Standard library only."""

import os
import signal
import subprocess
import time
from collections.abc import Set
from contextlib import suppress

from proxima.process.entry import prctl

PR_SET_CHILD_SUBREAPER = 36  # this process becomes the parent of its orphaned descendants
SECONDS = 10.0  # that the kernel may take to end processes


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads: the process and all that it started, but for those that left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def wait_or_kill(process: "subprocess.Popen[bytes]", seconds: float = 0.0) -> int:
    """Wait `seconds` for a process to end by itself, then kill it and its group. Returns its exit code."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    kill_group(process.pid)
    process.kill()
    return process.wait()


def adopt_orphans() -> None:
    """Make all descendants of this process, from now on, its children when their parents end."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_children(besides: Set[int] = frozenset()) -> None:
    """Kill every child of this process except those `besides`, then the orphans that this leaves."""
    deadline = time.monotonic() + SECONDS
    while (orphans := _children() - besides) and time.monotonic() < deadline:
        for pid in orphans:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def _children() -> set[int]:
    """The process ids of the children, zombies included; empty if the kernel does not list them."""
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(word) for word in file.read().split()}
    return set()


def describe_exit(code: int, said: str = "") -> str:
    """Describe how a process ended, given its exit code, where -N is signal N, and what it said last."""
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    if code == -signal.SIGKILL:
        how += ", which the kernel sends when memory runs out"
    return f"{how}: {said}" if said else how
