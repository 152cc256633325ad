"""The first thing in a process of proxima's: `python entry.py MODULE CHANNEL …` runs MODULE as `__main__`.

MODULE=FOLDER is a module of another distribution, with the folder of its package. CHANNEL is a connected socket that
MODULE uses, or the path of a listening one. The process ends as soon as the other end is closed, even during imports.
Modules of `proxima.process` and of other distributions see to that themselves, and leave nothing else behind: one that
was stopped by what it runs is continued when its parent ends.

It is run as a file, because importing a package of proxima first would take seconds. Standard library only.
"""

import importlib.util
import io
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL
PR_SET_PDEATHSIG = 1  # sets the signal that this process gets when the thread that started it ends


def prctl(option: int, value: int) -> None:
    """Call Linux's `prctl`; do nothing elsewhere."""
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Make Linux send this process a signal when the thread that started it ends, however it ends; works even while
    loading an extension blocks all threads."""
    prctl(PR_SET_PDEATHSIG, number)


def end_with(channel: int) -> None:
    """Wait until the other end is closed, for whatever reason, and exit the process. Reads nothing from the channel."""
    hang_up = select.poll()
    hang_up.register(channel, select.POLLHUP)  # Linux always reports it, macOS where it is asked for
    while not any(event & ENDED for _, event in hang_up.poll()):
        time.sleep(0.05)  # macOS may report data, too
    os._exit(0)


def load_package(name: str, folder: str) -> None:
    """Import a package from where it is, wherever the interpreter would look for it."""
    place = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(name, place, submodule_search_locations=[folder])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def connection_to(path: str) -> str:
    """The descriptor of a connection to a listening socket."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return str(connection.detach())


if __name__ == "__main__":
    del sys.argv[0]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what is printed must not fail
    if sys.argv[1].startswith("/"):
        sys.argv[1] = connection_to(sys.argv[1])
    sys.argv[0], _, own_folder = sys.argv[0].partition("=")
    if own_folder or sys.argv[0].startswith("proxima.process."):
        end_with_parent(signal.SIGCONT)
    else:
        end_with_parent()
        threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()
    for package, folder in (("proxima", PACKAGE), (sys.argv[0].partition(".")[0], own_folder)):
        if folder and package not in sys.modules and (own_folder or sys.argv[0].startswith("proxima.")):
            load_package(package, folder)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
