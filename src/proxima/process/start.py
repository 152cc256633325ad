"""Starts a module in another process, which ends with this one."""

import ctypes  # noqa: F401  `end_with_parent` needs it, and between a fork and an exec nothing may be imported
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.process import entry
from proxima.process.kill import wait_or_kill

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # variables
START = Path(entry.__file__).resolve()
# Options of `subprocess.Popen` for a program that is not ours: Linux kills it when the thread that started it ends.
ENDS_WITH_US: dict[str, Any] = {"start_new_session": True, "preexec_fn": entry.end_with_parent}


@dataclass(frozen=True)
class Child:
    """A process that runs a module of ours, and the socket to it."""

    process: "subprocess.Popen[bytes]"
    channel: socket.socket

    def end(self, seconds: float = 0.0) -> int:
        """Close the socket, wait `seconds` for the process to end by itself, even if what it runs has stopped it, then
        kill it with its group. Returns its exit code; may be called twice."""
        self.channel.close()
        self.process.send_signal(signal.SIGCONT)
        return wait_or_kill(self.process, seconds)


def start_module(module: str, *arguments: object, flag: str = "-P", fds: Sequence[int] = (), **options: Any) -> Child:
    """Start a module as `__main__` of another process.

    The process is in a session of its own. It ends when the socket is closed or the thread that called this function
    ends, so also when this process does; `entry` has the exceptions. The module finds its end of the socket in
    `sys.argv[1]`.

    Args:
        arguments: `sys.argv[2:]`.
        flag: of the interpreter.
        fds: descriptors that the process inherits.
        options: of `subprocess.Popen`; standard streams are the null device unless given.
    Raises: OSError: the process can't be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, flag, str(START), module, str(theirs.fileno()), *map(str, arguments)],
                pass_fds=(theirs.fileno(), *fds),
                start_new_session=True,  # Ctrl-C is for the run, which stops the process when it is done
                **{**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL), **options},
            )
        except BaseException:
            ours.close()
            raise
    return Child(process, ours)
