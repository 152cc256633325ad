"""Runs one command and makes sure that none of its processes outlives proxima.

Its arguments are SECONDS COMMAND….

In a separate interpreter, because proxima may be killed without a chance to clean up. Only proxima holds the other end
of its channel. When that end closes, when the parent process changes, or on SIGTERM, the command receives
SIGTERM, and after SECONDS its whole process group and every process that it left behind receive SIGKILL. The exit
code is the command's, 128 + N after signal N. Standard library only.
"""

import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from types import FrameType

from proxima.process.entry import end_with_parent
from proxima.process.kill import adopt_orphans, kill_children, kill_group

BEAT = 1.0  # seconds between checks that the parent process is still the same, which no signal reports


class Guardian:
    """Runs the command and stops it when necessary.

    Args:
        channel: to proxima.
        command: the command to run, in a new session.
        patience: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, channel: socket.socket, command: list[str], patience: float) -> None:
        self.channel, self.patience = channel, patience
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
        readable, _, _ = select.select([self.channel, self.bell], [], [], BEAT)
        if self.bell in readable:
            os.read(self.bell, 4096)
        if self.channel in readable and not self.channel.recv(1):
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


if __name__ == "__main__":
    sys.exit(Guardian(socket.socket(fileno=int(sys.argv[1])), sys.argv[3:], float(sys.argv[2])).run())
