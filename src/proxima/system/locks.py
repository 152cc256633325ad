"""Locks between processes, also on file systems that have none; and files at names that others can foresee.

The operating system holds a lock (`flock`) and releases it when the process ends, however it ends. Lustre without
`-o flock`, some NFS and some FUSE have no such locks. There a file that only one process can create stands for the
writer's lock. It names its process by host, boot, number and start, so that the next process on that machine knows
whether it still lives.
"""

import errno
import json
import os
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from proxima.system.linux import kernel_id, lock, process_start

# What `flock` answers where a file system has no locks.
WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
OWNER = ".owner"  # after the name of a lock: the file that stands for it where there are none
OWNER_BYTES = 4096  # more is no owner's note


def open_regular(path: Path, mode: str, *, own: bool = False) -> IO[bytes]:
    """Open a file at a name that others can foresee, unbuffered. A pipe put there would be waited for, a device be read
    without end, and a link lead elsewhere: all three are refused at once.

    Args:
        mode: `rb` or `ab`; a file to be appended to is created where it is missing.
        own: it must belong to this user.

    Raises:
        OSError: it can't be opened, or is none of those.
    """
    if mode == "ab":
        create = os.O_RDWR | os.O_APPEND | os.O_CREAT
    else:
        create = os.O_RDONLY
    descriptor = os.open(path, create | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if own and facts.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "another user's file", str(path))
    return os.fdopen(descriptor, mode, buffering=0)


class FileLock:
    """The lock of a file: one writer, or any number of readers. Held from the constructor until `release`, or until the
    process ends, however it ends.

    Where the file system has no locks, a writer's is a file beside it (`.owner`); readers are let in while there is
    none, and hold nothing.

    Attributes:
        replaced: True where the file system has no locks.

    Raises:
        BlockingIOError: another process holds it. OSError: it can't be opened.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self.shared = shared
        self.replaced = False
        mode = "rb" if shared else "ab"
        self.file = open_regular(path, mode)
        try:
            self._acquire()
        except BaseException:
            self.file.close()
            raise

    def _acquire(self) -> None:
        try:
            lock(self.file, shared=self.shared)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            self.replaced = True
            self._acquire_owner()

    @property
    def _owner(self) -> Path:
        return self.path.with_name(self.path.name + OWNER)

    def _acquire_owner(self) -> None:
        while True:
            held = _read(self._owner)
            if held is not None and _lives(held):
                raise BlockingIOError(errno.EWOULDBLOCK, f"another process holds it, says {self._owner}")
            if held is not None:
                _set_aside(self._owner, held)
            if self.shared or _create(self._owner):
                return

    def release(self) -> None:
        """Unlock."""
        if self.replaced and not self.shared:
            self._owner.unlink(missing_ok=True)
        self.file.close()


def is_held(path: Path) -> bool:
    """True while another process holds the lock of a file as its writer."""
    try:
        FileLock(path, shared=True).release()
    except OSError as error:  # another: no folder, no lock
        return isinstance(error, BlockingIOError)
    return False


def _own_note() -> bytes:
    process = os.getpid()
    note = {
        "host": socket.gethostname(),
        "boot": kernel_id().decode(),
        "pid": process,
        "start": process_start(process),
        "token": secrets.token_hex(8),
    }
    return json.dumps(note).encode() + b"\n"


def _create(path: Path) -> bool:
    """Create the file of an owner, complete from its first moment; False if another process was first."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    draft.write_bytes(_own_note())
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        return _create_without_links(path, draft.read_bytes())
    finally:
        draft.unlink(missing_ok=True)
    return True


def _create_without_links(path: Path, note: bytes) -> bool:
    try:
        with path.open("xb") as file:
            file.write(note)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> bytes | None:
    try:
        with open_regular(path, "rb") as file:
            return file.read(OWNER_BYTES)
    except FileNotFoundError:
        return None


def _lives(note: bytes) -> bool:
    """Whether the process that a note names may live; one of another machine may."""
    try:
        owner: dict[str, Any] = json.loads(note)
        host = owner["host"]
        boot = owner["boot"]
        process = int(owner["pid"])
        start = owner["start"]
    except (ValueError, KeyError, TypeError):
        return True  # being written, or not ours
    if host != socket.gethostname():
        return True
    if boot != kernel_id().decode():
        return False
    return process_start(process) is not None and process_start(process) == start


def _set_aside(path: Path, note: bytes) -> None:
    """Remove the file of an owner that has ended, unless another process has put its own in its place meanwhile."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):
        os.rename(path, aside)
    found = _read(aside)
    if found is not None and found != note:
        with suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)
