"""The lock of a run folder: one writer, or any number of readers, each with a note that says who it is."""

import os
import shlex
import socket
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from proxima.data import UserError
from proxima.system.jsonl import dumps, read_lines

try:
    import fcntl
except ImportError:  # Windows: two processes in one folder are not detected
    fcntl = None  # type: ignore[assignment]


class FolderLock:
    """Held from the constructor until `release`, or until the process ends, however it ends.

    The operating system holds the lock; the file's lines only say who took it: a writer's replaces all others, a
    reader's is appended, and a second one says that it has released it. A `shared` lock, for reading, lets other
    readers in.

    Raises:
        UserError: another process holds it; names that process, its host, its command, and since when.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path, self.shared = path, shared
        self._file = _open(path)
        if fcntl is not None:
            try:
                fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except OSError as error:
                self._file.close()
                place, who = path.parent, holders(path)
                reason = f"{place} is in use by another process{f' ({who})' if who else ''}"
                raise UserError(reason, remedy="wait for it, stop it, or set folder=PATH") from error
        if not shared:
            self._file.truncate(0)
        self._note(datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def is_gone(self) -> bool:
        """True if the file was deleted or moved, and so perhaps the whole folder."""
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError:
            return True

    def release(self) -> None:
        """Unlock."""
        if self.shared:
            self._note(None)
        self._file.close()

    def _note(self, since: str | None) -> None:
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        note = {"pid": os.getpid(), "host": socket.gethostname(), "command": command[:200], "since": since}
        with suppress(OSError):  # a full disk, or a folder that may only be read: the lock holds without a note
            self._file.write(f"{dumps(note)}\n".encode())


def is_locked(path: Path) -> bool:
    """True while another process writes to the folder of this lock."""
    try:
        with path.open("rb") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no folder, no lock
        pass
    return False


def holders(path: Path) -> str:
    """The notes in the lock file, in words; empty if there are none."""
    notes: dict[Any, dict[str, Any]] = {}
    with suppress(OSError, ValueError):
        for note in read_lines(path):
            notes[note["host"], note["pid"]] = note
    taken = [note for note in notes.values() if note["since"] is not None]
    living = [note for note in taken if not _ended(note)]
    shown = [f"pid {n['pid']} on {n['host']}, `{n['command']}`, since {n['since']}" for n in living or taken[-1:]]
    if taken and not living:
        return f"its note is of {shown[0]}, which has exited; a process that it started may still be running"
    return "; ".join(shown)


def _ended(note: dict[str, Any]) -> bool:
    """True for a local process that has exited."""
    if note["host"] != socket.gethostname():
        return False
    try:
        os.kill(note["pid"], 0)
    except OSError as error:  # any other than this one: it is of another user
        return isinstance(error, ProcessLookupError)
    return False


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("ab", buffering=0)
    except OSError:  # a reader of a folder that may only be read
        return path.open("rb", buffering=0)
