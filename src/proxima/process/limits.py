"""Limits of a process for code that nobody has read. Standard library only.

They contain accidents: endless loops, runaway memory, files and processes, and a text that a careless parser evaluates.
What hostile code needs is a `sandbox`, in which they apply too.
"""

import os
import resource
import sys
from contextlib import suppress
from typing import Any

from proxima.process.linux_process import memory_pages


def limit(name: str, value: int) -> None:
    """Set a limit of this process by its name in `resource`, without RLIMIT_; permanent unless it runs as root."""
    with suppress(AttributeError, OSError, ValueError):  # not every system has all of them
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def limit_growth(name: str, column: int, memory_mb: int) -> None:
    """Allow `memory_mb` MiB more than the current use, see `memory_pages`, if it is known."""
    pages = memory_pages(column)
    if pages is not None:
        limit(name, pages * resource.getpagesize() + (memory_mb << 20))


FORBIDDEN = (
    *("subprocess.", "pty.", "socket.connect", "socket.bind", "socket.sendto"),
    *("os.fork", "os.posix_spawn", "os.spawn", "os.exec", "os.system", "os.kill"),
)
SYSTEM_CALLS = (
    *("fork", "vfork", "clone", "daemon", "posix_spawn", "posix_spawnp", "system", "popen", "syscall"),
    *("kill", "killpg", "tgkill", "sigqueue", "pidfd_send_signal", "process_vm_readv", "ptrace"),
)
CHANGES = (
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.utime", "shutil.rmtree"),
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def confine(who: str, folder: str | None = None) -> None:
    """Forbid processes, signals, connections, and changes to files outside `folder` from now on; None: any change, and
    libraries.

    Args:
        who: names this process in the message of the PermissionError.
    """
    if folder is None:
        inside = None
    else:
        inside = os.path.realpath(folder)
    sys.addaudithook(lambda event, arguments: _refuse(event, arguments, who, inside))


def _refuse(event: str, arguments: tuple[Any, ...], who: str, folder: str | None) -> None:
    if event.startswith(FORBIDDEN) or (folder is None and event == "ctypes.dlopen"):
        raise PermissionError(f"{event} is not allowed in {who}")
    if event == "ctypes.dlsym" and arguments[1] in SYSTEM_CALLS:
        raise PermissionError(f"{arguments[1]} of the C library is not allowed in {who}")
    written = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
    if written:
        changed = arguments[:1]
    elif event in CHANGES:
        changed = arguments
    else:
        changed = ()
    for path in changed:
        if folder is None:
            raise PermissionError(f"{event} is not allowed in {who}")
        if isinstance(path, str | bytes | os.PathLike):
            place = os.path.realpath(os.fsdecode(path))
            if place != os.devnull and os.path.commonpath([place, folder]) != folder:
                raise PermissionError(f"{event} is not allowed outside the folder of {who}")
