"""A temporary folder that does not outlive its process for long: what a killed one has left is removed by the next."""

import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: nobody knows whose folder it is, and what is left stays
    fcntl = None  # type: ignore[assignment]

PREFIX = "proxima-weights-"
LOCK_FILE = ".held"  # a file that the process which made the folder keeps locked
BOOT = Path("/proc/sys/kernel/random/boot_id")  # of a running Linux kernel, and of no other, ever


class LockedFolder:
    """A folder with a unique name and a lock, created at once. The operating system releases the lock when the process
    ends, however it ends; an unlocked folder is a leftover.

    Args:
        parent: what it is made in.
        shared: by other users and machines: all may read what the parent lets them, and the lock is one among the
            processes of this kernel only, whose name is beside it.
        name: that it has on another machine, and gets here too; it may be there already.
    """

    def __init__(self, parent: Path, *, shared: bool = False, name: str | None = None) -> None:
        self._file: IO[bytes] | None = None
        while self._file is None:
            if name is not None:
                self.path = parent / name
                self.path.mkdir(exist_ok=True)
            elif shared:
                self.path = parent / f"{PREFIX}{secrets.token_hex(8)}"
                self.path.mkdir()
            else:
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._file = _lock(self.path / LOCK_FILE, may_fail=shared)
        self._file.write(_kernel())
        self._file.flush()

    def remove(self) -> None:
        """Remove it with what it holds. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._file is not None:
            self._file.close()


def _kernel() -> bytes:
    """The boot id of the running kernel; empty if it is not available."""
    with suppress(OSError):
        return BOOT.read_bytes().strip()
    return b""


def _lock(path: Path, *, may_fail: bool) -> IO[bytes] | None:
    """Create and lock a file; None if another process removed it as a leftover meanwhile.

    Args:
        may_fail: a disk that has no locks is no error: then nobody takes it for a leftover.
    """
    file = path.open("xb")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            if not may_fail:
                raise
        if not os.fstat(file.fileno()).st_nlink:
            file.close()
            return None
    return file


def remove_leftovers(parent: Path, *, shared: bool = False) -> list[Path]:
    """Remove the folders of processes that have ended.

    Args:
        shared: with other machines, whose locks may not be seen here: only folders that were made under this kernel.

    Returns: those that were removed.
    """
    removed = []
    for file in parent.glob(f"{PREFIX}*/{LOCK_FILE}") if fcntl is not None else ():
        try:
            with file.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if shared and (not _kernel() or lock.read() != _kernel()):
                    continue
                shutil.rmtree(file.parent, ignore_errors=True)
                removed.append(file.parent)
        except OSError:  # it is locked, of another user, or gone
            continue
    return removed
