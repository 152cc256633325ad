"""A temporary folder that does not outlive its process for long: the next process removes what a killed one has
left."""

import fcntl
import os
import secrets
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO

PREFIX = "proxima-weights-"
LOCK_FILE = ".held"  # a file kept locked by the process that created the folder
BOOT = Path("/proc/sys/kernel/random/boot_id")  # unique to each boot of a Linux kernel


class LockedFolder:
    """A temporary folder, created at once. The operating system releases its lock when the process ends, however it
    ends; an unlocked folder is a leftover.

    Args:
        parent: the folder in which it is created.
        shared: the parent is shared with other users and machines: its permissions decide who may read the folder, and
            the lock is valid only among processes of this kernel, whose id is in the lock file.
    """

    def __init__(self, parent: Path, *, shared: bool = False) -> None:
        self.path = parent / f"{PREFIX}{secrets.token_hex(8)}"
        self.path.mkdir(0o777 if shared else 0o700)
        self._file = _lock(self.path, may_fail=shared)
        self._file.write(_kernel())
        self._file.flush()

    def remove(self) -> None:
        """Remove the folder and its contents. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._file.close()


def _kernel() -> bytes:
    """The boot id of the running kernel; empty if unavailable."""
    with suppress(OSError):
        return BOOT.read_bytes().strip()
    return b""


def _lock(folder: Path, *, may_fail: bool) -> IO[bytes]:
    """Create the lock file of a folder. It is locked before it has its name, lest another process take it for a
    leftover.

    Args:
        may_fail: a file system without locks is not an error: there no process can mistake it for a leftover.
    """
    file = (folder / f"{LOCK_FILE}.{os.getpid()}").open("xb")
    with suppress(OSError) if may_fail else nullcontext():
        fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(file.name, folder / LOCK_FILE)
    return file


def remove_leftovers(parent: Path, *, shared: bool = False) -> None:
    """Remove the folders of processes that have ended.

    Args:
        shared: the parent is shared with other machines, whose locks may be invisible here: remove only folders created
            under this kernel.
    """
    for file in parent.glob(f"{PREFIX}*/{LOCK_FILE}"):
        try:
            with file.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if shared and (not _kernel() or lock.read() != _kernel()):
                    continue
                shutil.rmtree(file.parent, ignore_errors=True)
        except OSError:  # it is locked, owned by another user, or gone
            continue
