"""Runs one command and makes sure that none of its processes outlives proxima; see `guarded`.

In a separate interpreter, because proxima may be killed without a chance to clean up. Standard input is a pipe whose
other end only proxima holds. When that end closes, when the parent process changes, or on SIGTERM, the command receives
SIGTERM, and after the patience its whole process group and every process that it left behind receive SIGKILL. The exit
code is the command's, 128 + N after signal N. Standard library only.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from proxima.process.entry import end_with_parent
from proxima.process.kill import adopt_orphans, kill_children, kill_group
from proxima.process.start import command_of_module

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
        adopt_orphans()  # of the command; else they would become children of init
        self.parent = os.getppid()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),  # if this process is killed
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
        kill_group(self.process.pid)
        code = self.process.wait()
        kill_children()
        return code if code >= 0 else 128 - code


def guarded(command: Sequence[str], patience: float) -> list[str]:
    """The command that runs `command` under a guardian; start it with a pipe as its standard input.

    Args:
        patience: seconds between SIGTERM and SIGKILL.
    """
    return command_of_module(__name__, f"{patience:g}", *command, flag="-I")


if __name__ == "__main__":
    sys.exit(Guardian(sys.argv[3:], float(sys.argv[2])).run())
