"""Reads a text file that a user names, which may be anything."""

import errno
import os
import stat
from pathlib import Path

LARGEST = 1 << 28  # bytes; of a recipe or a file of records


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file or a pipe; newlines become `\\n`.

    Raises:
        OSError: it can't be read, is a device, or is larger than `LARGEST`; the error has the path.
        UnicodeDecodeError: it is not text in this encoding.
    """
    try:
        with path.open("rb") as file:
            if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.ENODEV, "a device, and not a file", str(path))
            content = file.read(LARGEST + 1)
    except ValueError:  # the path has a NUL character
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except OSError as error:
        error.filename = str(path)  # a failed read names no file
        raise
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
