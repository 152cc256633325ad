"""Atomic writes: a reader, or a resume after a kill, sees either the old content of a file or the new one."""

import errno
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from proxima.data.errors import FieldError
from proxima.system.linux import lock


def make_folder(folder: Path) -> list[Path]:
    """Make a folder, and those above it; if that fails, none of them stays. Returns those that were missing, the
    innermost first."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        remove_empty(missing)
        raise
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders, in this order, except those that are not empty or missing."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def check_writable(field: str, value: str, remedy: str) -> None:
    """Raise FieldError if the folder that a field names, or a file in it, can't be made. Only a folder that exists is
    written to, because other processes may make the same one at this moment. Leaves nothing behind."""
    from tempfile import TemporaryDirectory

    try:
        folder = Path(value).expanduser().absolute()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        TemporaryDirectory(dir=there).cleanup()
        for name in folder.relative_to(there).parts:  # a name too long fails only in a folder that exists
            (there / name).exists()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte; a user who does not exist
        reason = f"can't be written: {(isinstance(error, OSError) and error.strerror) or error}"
        raise FieldError(field, value, reason, remedy=remedy) from error


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file in the folder of `path` and rename it to `path` when the block ends without an error.

    The data reach the disk (fsync) before the rename, and the rename before this returns. An error inside, such as a
    full disk, removes the temporary file, leaves `path` unchanged and is re-raised; a kill leaves at most a stray
    `.NAME.part`, which the next write of the same file replaces. A device or a pipe, such as `/dev/stdout`, is written
    to directly.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a rename would put a file in its place
        with path.open("wb") as file:
            yield file
        return
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename in (None, str(part)):
            error.filename = str(path)  # a failed write names no file
        with suppress(OSError):
            part.unlink()
        raise
    flush_to_disk(path.parent)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace the content of `path` (text as UTF-8), all or nothing."""
    if isinstance(content, str):
        content = content.encode("utf-8")
    with atomic_writer(path) as file:
        file.write(content)


def ordinary_modes(folder: Path) -> None:
    """Give all files below `folder` the mode that a new file has here, where the folder has that of a new folder: some
    libraries write files that only their owner can read."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode | (path.stat().st_mode & 0o111))


def flush_to_disk(path: Path) -> None:
    """Make a file, or the renames and new files in a folder, survive a power failure.

    Raises: OSError: the path can't be opened or written.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_folder(target: Path, check: Callable[[Path], object] = Path.exists) -> Iterator[Path]:
    """Yield a folder next to `target` to write into; it replaces `target` when the block ends without an error. A link
    stays: the folder that it leads to is replaced.

    Files are flushed to disk before the rename. An error removes the unfinished folder and leaves `target` unchanged. A
    kill leaves it as `.NAME.….part`, and between two renames the former `target`, complete, as `.NAME.….old`; the next
    process that makes the same folder removes the first at once, and the second when there is a `target` again.

    Args:
        check: raises if `target` must not be replaced. It is called at the beginning and again before the rename: of
            two processes that make the same folder, the second to finish is refused.
    """
    check(target)
    target = target.resolve()
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    former = part.with_suffix(".old")
    created = make_folder(target.parent)
    held = -1
    try:
        _remove_killed(target)
        held = _make_held(part)
        yield part
        ordinary_modes(part)
        for path in (*part.rglob("*"), part):
            flush_to_disk(path)
        check(target)
        if target.exists():
            target.rename(former)
        part.rename(target)
        flush_to_disk(target.parent)
        shutil.rmtree(former, ignore_errors=True)
    finally:
        if former.exists() and not target.exists():
            former.rename(target)
        shutil.rmtree(part, ignore_errors=True)
        _close(held)
        _remove_former(target)
        remove_empty(created)


def _make_held(part: Path) -> int:
    """Make a folder that is locked until its descriptor, which is returned, is closed. It gets its name once it is, so
    that no other process takes it for a killed one's."""
    draft = part.with_suffix(".draft")
    draft.mkdir()
    descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # no locks here: nobody removes it
        lock(descriptor)
    draft.rename(part)
    return descriptor


def _remove_killed(target: Path) -> None:
    """Remove what killed processes have left of the same folder: what no process holds a lock on."""
    for part in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        with suppress(OSError):
            descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                lock(descriptor)
                shutil.rmtree(part, ignore_errors=True)
            finally:
                os.close(descriptor)


def _remove_former(target: Path) -> None:
    """Remove former folders that a kill between two renames has left, if there is one in their place."""
    if target.exists():
        for former in target.parent.glob(f".{glob.escape(target.name)}.*.old"):
            shutil.rmtree(former, ignore_errors=True)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
