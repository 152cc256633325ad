"""A temporary folder that does not outlive its process for long: what a killed one has left is removed by the next."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: nobody knows whose folder it is, and what is left stays
    fcntl = None  # type: ignore[assignment]

PREFIX = "proxima-weights-"
HELD = ".held"  # a file that the process which made the folder keeps locked


class HeldFolder:
    """Made at once, with a name of its own. The operating system ends its lock with the process, however that ends, and
    an unlocked one is a leftover.

    Args:
        parent: what it is made in.
    """

    def __init__(self, parent: Path) -> None:
        self._file: IO[bytes] | None = None
        while self._file is None:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._file = _lock(self.path / HELD)

    def remove(self) -> None:
        """Remove it with what it holds. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._file is not None:
            self._file.close()


def _lock(path: Path) -> IO[bytes] | None:
    """The new file, locked; None: another process took it for a leftover in between."""
    file = path.open("xb")
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not os.fstat(file.fileno()).st_nlink:
            file.close()
            return None
    return file


def remove_leftovers(parent: Path) -> list[Path]:
    """Remove the folders of processes that have ended.

    Returns: those that were removed.
    """
    found = []
    for file in parent.glob(f"{PREFIX}*/{HELD}") if fcntl is not None else ():
        try:
            with file.open("rb") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(file.parent, ignore_errors=True)
                found.append(file.parent)
        except OSError:  # it is locked, of another user, or gone
            continue
    return found
