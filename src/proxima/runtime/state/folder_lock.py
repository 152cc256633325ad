"""The lock of a run folder: one writer, with a note that says who it is, or any number of readers."""

import fcntl
import os
import shlex
import socket
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from proxima.data import UserError
from proxima.system.jsonl import utf8

WAIT = "wait for it, stop it, or set folder=PATH"


class FolderLock:
    """Held from the constructor until `release`, or until the process ends, however it ends.

    The operating system holds the lock; a writer also notes in the file who it is. If it is killed, the note stays, and
    what it started may hold the lock. A `shared` lock, for reading, lets other readers in.

    Raises:
        UserError: another process holds it; with the note of a writer, and the remedy.
    """

    def __init__(self, path: Path, *, shared: bool = False, remedy: str = WAIT) -> None:
        self.path, self.shared = path, shared
        self._file = path.open("rb" if shared else "ab", buffering=0)
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            noted = ""
            with suppress(OSError):  # the file was deleted at this moment
                noted = path.read_text(encoding="utf-8", errors="replace").strip()
            reason = f"{path.parent} is in use by another process{f' ({noted})' if noted else ''}"
            raise UserError(reason, remedy=remedy) from error
        if not shared:
            self._file.truncate(0)
            with suppress(OSError):  # a full disk: the lock holds without a note
                self._file.write(_own_note().encode())

    @property
    def is_gone(self) -> bool:
        """True if the file was deleted or moved, and so perhaps the whole folder."""
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError:
            return True

    def release(self) -> None:
        """Unlock."""
        if not self.shared:
            self._file.truncate(0)
        self._file.close()


def is_locked(path: Path) -> bool:
    """True while another process writes to the folder of this lock."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # another: no folder, no lock
        return isinstance(error, BlockingIOError)
    return False


def _own_note() -> str:
    command = utf8(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200])
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return f"pid {os.getpid()} on {socket.gethostname()}, `{command}`, since {since}\n"
