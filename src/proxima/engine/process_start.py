"""Runs a module as `__main__` in a process that ends as soon as its channel is closed, even during imports:
`python process_start.py MODULE CHANNEL…`, where the channel is a connected socket that MODULE uses.

Started as a file: importing a package of proxima would take seconds first. Standard library only.
"""

import ctypes
import os
import runpy
import select
import signal
import sys
import threading
from contextlib import suppress

PR_SET_PDEATHSIG = 1  # sets the signal that this process gets when the thread that started it ends


def end_with(channel: int) -> None:
    """Wait until the other end is closed, for whatever reason, and exit the process. Reads nothing from the channel."""
    hang_up = select.poll()
    hang_up.register(channel, 0)  # hang-ups are always reported
    hang_up.poll()
    os._exit(0)


if __name__ == "__main__":
    with suppress(OSError, AttributeError):  # Linux: works even while loading an extension blocks all threads
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=end_with, args=(int(sys.argv[2]),), daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
