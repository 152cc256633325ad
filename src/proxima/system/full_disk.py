"""Recognises a full disk in the errors of the system and of libraries."""

import errno
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBE = 1 << 16  # bytes: more than a file system can store without a new block


def is_disk_full(error: BaseException) -> TypeGuard[OSError]:
    """True for a system error that reports a full disk: no space left, or the user's quota is used up."""
    return isinstance(error, OSError) and error.errno in DISK_FULL


def as_disk_full(error: BaseException, path: Path) -> OSError | None:
    """The system error behind a library error without an errno (safetensors, tokenizers, SQLite) that was raised while
    `path` was written; None if a full disk was not the cause.

    Call it before deleting the partial output: if the error's text does not tell, a small write to the folder is tried.
    """
    if is_disk_full(error):
        error.filename = error.filename or str(path)
        return error
    number = next((number for number in DISK_FULL if os.strerror(number) in str(error)), None)
    if number is None and isinstance(error, Exception) and not isinstance(error, OSError):
        number = _probe(path.parent)
    if number is None:
        return None
    return OSError(number, os.strerror(number), str(path))


def sqlite_disk_full(error: sqlite3.OperationalError, path: Path) -> OSError | None:
    """The full disk behind an error of SQLite about the file `path`; None if it was not the cause. SQLite calls a spent
    quota, and what it can't place beside the file, an I/O error."""
    if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_IOERR:
        return as_disk_full(error, path)
    return None


def _probe(folder: Path) -> int | None:
    """The errno if a small file can't be written to the folder because there is no space; otherwise None."""
    file = folder / ".space.part"
    try:
        with file.open("wb", buffering=0) as probe:
            written = 0
            while written < _PROBE:  # a nearly full disk accepts part of it without an error
                written += probe.write(bytes(_PROBE - written))
            os.fsync(probe.fileno())
        return None
    except OSError as error:
        return error.errno if is_disk_full(error) else None
    finally:
        with suppress(OSError):
            file.unlink()
