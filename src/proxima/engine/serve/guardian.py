"""Runs one command and makes sure that none of its processes outlives proxima: `python guardian.py SECONDS COMMAND…`.

Started as a file, in a separate interpreter, because proxima may be killed without a chance to clean up. Standard input
is a pipe whose other end only proxima holds. When that end closes, when the parent process changes, or on SIGTERM, the
command receives SIGTERM, and after `SECONDS` its whole process group and every process that it left behind receive
SIGKILL. The exit code is the command's, 128 + N after signal N. Standard library only.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
BEAT = 1.0  # seconds between checks that the parent process is still the same, which no signal reports


class Guardian:
    """Runs the command and stops it when necessary.

    Args:
        command: the command to run, in a new session.
        patience: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, command: list[str], patience: float) -> None:
        self.patience = patience
        self.asked = False
        self.bell, ring = os.pipe()  # signals write to it, so that `select` returns
        os.set_blocking(ring, False)
        signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self.ask)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for proxima, which stops this process when it is done
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the command become children of this process, not of init
        self.parent = os.getppid()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),  # if this process is killed
        )

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM."""
        self.asked = True

    def abandoned(self) -> bool:
        """Return True if proxima is gone or wants the command to stop; returns at any signal, and after `BEAT`
        seconds."""
        readable, _, _ = select.select([0, self.bell], [], [], BEAT)
        if self.bell in readable:
            os.read(self.bell, 4096)
        if 0 in readable and not os.read(0, 1):
            return True
        return self.asked or os.getppid() != self.parent

    def run(self) -> int:
        """Wait for the command to end, or stop it; return the exit code."""
        while self.process.poll() is None and not self.abandoned():
            pass
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(self.patience)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.end_orphans()
        return code if code >= 0 else 128 - code

    def end_orphans(self) -> None:
        """Kill every process that the command left behind, until none is left or `patience` runs out."""
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not (left := children_of(os.getpid())):
                return
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """The processes whose parent is `pid`; empty without /proc."""
    children = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            state, parent = place.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                children.append(int(place.parent.name))
    return children


if __name__ == "__main__":
    sys.exit(Guardian(sys.argv[2:], float(sys.argv[1])).run())
