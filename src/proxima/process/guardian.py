"""Runs one command and makes sure that none of its processes outlives proxima. Its arguments are SECONDS COMMAND….

It runs in a separate interpreter, because proxima may be killed without a chance to clean up. Only proxima holds the
other end of its channel. The command has the standard streams.

The command is ended when that end closes, when the parent process changes, or on SIGTERM: it receives SIGTERM, and
after SECONDS its process group, and every process that it left behind, receive SIGKILL. The exit code is the
command's, or 128 + N after signal N. Standard library only.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading

from proxima.process.children import adopt_orphans, kill_children, wait_or_kill
from proxima.process.entry import end_with_parent

BEAT = 0.1  # seconds between checks that command and parent are still there


def guard(channel: socket.socket, command: list[str], patience: float) -> int:
    """Run the command, in a new session, until it ends or must end; return its exit code.

    Args:
        channel: to proxima, which sends nothing.
        patience: seconds between SIGTERM and SIGKILL.
    """
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for proxima, which stops this process when it is done
    adopt_orphans()  # of the command; else they would become children of init
    parent = os.getppid()
    process = subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=lambda: end_with_parent(signal.SIGTERM),  # if this process is killed
    )
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # only the command has them, so that a pipe ends when it closes them
        os.dup2(nothing, stream)
    while process.poll() is None and not asked.is_set() and os.getppid() == parent:
        if select.select([channel], [], [], BEAT)[0]:
            break
    process.terminate()
    code = wait_or_kill(process, patience)
    kill_children()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(guard(socket.socket(fileno=int(sys.argv[1])), sys.argv[3:], float(sys.argv[2])))
