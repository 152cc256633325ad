"""Reads a folder or a file that somebody else has made, as a task that was downloaded.

A link is followed only if it stays in the folder. Only regular files are read: a FIFO would block for ever, a
device has no end. Size, number and depth have bounds. Whatever the folder has, the result is a value or a
`ForeignFileError`. Standard library only: other interpreters load this file, too.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_TEXT = 1 << 20  # bytes of a text that is read whole
MOST_LINE = 1 << 26  # bytes of a line
MOST_FILES = 20_000  # of a folder
MOST_DEPTH = 32  # folders inside one another
MOST_BYTES = 1 << 36  # of all files that are hashed or copied
PART = 1 << 20  # bytes read at once
OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class ForeignFileError(ValueError):
    """A file can't be read, or is refused; the message is one line that begins with its name."""


class ForeignFolder:
    """A folder whose content is not trusted.

    Args:
        path: of the folder; links in the path itself are the user's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._top = path.resolve()

    def text(self, name: str, most: int = MOST_TEXT) -> str:
        """The text of a file, in UTF-8.

        Raises:
            ForeignFileError: it is refused, has more than `most` bytes, or is not UTF-8.
        """
        try:
            return self.read(name, most).decode("utf-8")
        except UnicodeDecodeError:
            raise ForeignFileError(f"{name!r:.200} is not UTF-8") from None

    def read(self, name: str, most: int = MOST_TEXT) -> bytes:
        """The bytes of a file.

        Raises:
            ForeignFileError: it is refused, or has more than `most` bytes.
        """
        with self._opened(name) as file:
            return _whole(file, name, most)

    def names(self) -> list[Path]:
        """The files and links, relative to the folder, sorted. Linked folders are not entered.

        Raises:
            ForeignFileError: there are too many, they are too deep, or one is neither a file, a folder nor a link.
        """
        names: list[Path] = []
        folders = [Path()]
        seen = 0
        while folders:
            folder = folders.pop()
            if len(folder.parts) > MOST_DEPTH:
                raise ForeignFileError(f"{str(folder)!r:.200} is below more than {MOST_DEPTH} folders")
            try:
                with os.scandir(self._top / folder) as entries:
                    for entry in entries:
                        seen += 1
                        if seen > MOST_FILES:
                            raise ForeignFileError(f"{self.path.name!r:.200} has more than {MOST_FILES:,} files")
                        name = folder / entry.name
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(name)
                        elif entry.is_symlink() or entry.is_file(follow_symlinks=False):
                            names.append(name)
                        else:
                            raise ForeignFileError(f"{str(name)!r:.200} is neither a file nor a folder")
            except OSError as error:
                raise ForeignFileError(f"{str(folder)!r:.200} can't be read: {error.strerror}") from None
        return sorted(names)

    def digest(self) -> str:
        """A digest of the files, with their names and modes; of a link that leaves the folder, of where it leads.

        Raises:
            ForeignFileError: see `names`; or a file can't be read.
        """
        digest = hashlib.sha256()
        left = MOST_BYTES
        for name in self.names():
            place = self._top / name
            if place.is_symlink() and not self._is_inside(place):
                digest.update(os.fsencode(f"{name} -> {os.readlink(place)}\n"))
                continue
            if place.is_dir():
                continue
            with self._opened(str(name)) as file:
                facts = os.fstat(file)
                digest.update(os.fsencode(f"{name} {facts.st_mode:o} {facts.st_size}\n"))
                left -= facts.st_size
                if left < 0:
                    raise ForeignFileError(f"{self.path.name!r:.200} has more than {MOST_BYTES:,} bytes")
                for part in _parts(file, facts.st_size):
                    digest.update(part)
        return digest.hexdigest()[:24]

    def copy(self, target: Path) -> None:
        """Copy the files to a folder that exists; links are copied as links.

        Raises:
            ForeignFileError: see `digest`.
        """
        left = MOST_BYTES
        for name in self.names():
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if (self._top / name).is_symlink():
                os.symlink(os.readlink(self._top / name), place)
                continue
            with self._opened(str(name)) as file, place.open("wb") as copy:
                facts = os.fstat(file)
                left -= facts.st_size
                if left < 0:
                    raise ForeignFileError(f"{self.path.name!r:.200} has more than {MOST_BYTES:,} bytes")
                for part in _parts(file, facts.st_size):
                    copy.write(part)
            place.chmod(stat.S_IMODE(facts.st_mode) & 0o777 | 0o444)

    def _is_inside(self, place: Path) -> bool:
        try:
            return place.resolve(strict=True).is_relative_to(self._top)
        except (OSError, RuntimeError):  # it leads nowhere, or in a circle
            return False

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """A descriptor of a regular file of the folder."""
        place = self._top / name
        try:
            resolved = place.resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it leads nowhere"
            raise ForeignFileError(f"{name!r:.200} can't be read: {reason}") from None
        if not resolved.is_relative_to(self._top):
            raise ForeignFileError(f"{name!r:.200} is a link that leaves the folder")
        try:
            file = os.open(resolved, OPEN)
        except OSError as error:
            raise ForeignFileError(f"{name!r:.200} can't be read: {error.strerror}") from None
        try:
            _require_regular(file, name)
            yield file
        except OSError as error:
            raise ForeignFileError(f"{name!r:.200} can't be read: {error.strerror}") from None
        finally:
            os.close(file)


def read_file(path: Path, most: int = MOST_TEXT) -> bytes:
    """The bytes of a file that the user names; links in its path are the user's.

    Raises:
        OSError: it can't be opened or read.
        ForeignFileError: it is not a regular file, or has more than `most` bytes.
    """
    with opened_file(path) as file:
        return _whole(file, path.name, most)


def bounded_lines(path: Path, most: int = MOST_LINE) -> Iterator[str]:
    """The lines of a file in UTF-8, one after the other; see `read_file`.

    Raises:
        OSError: it can't be opened or read.
        ForeignFileError: it is not a regular file, or a line has more than `most` bytes or is not UTF-8.
    """
    with opened_file(path) as file, os.fdopen(os.dup(file), "rb") as stream:
        while line := stream.readline(most + 1):
            if len(line) > most:
                raise ForeignFileError(f"{path.name!r:.200} has a line of more than {most:,} bytes")
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError:
                raise ForeignFileError(f"{path.name!r:.200} is not UTF-8") from None
            yield text


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits; see `read_file`. It is read in parts.

    Raises:
        OSError: it can't be opened or read.
        ForeignFileError: it is not a regular file.
    """
    digest = hashlib.sha256()
    with opened_file(path) as file:
        for part in _parts(file, os.fstat(file).st_size):
            digest.update(part)
    return digest.hexdigest()


@contextmanager
def opened_file(path: Path) -> Iterator[int]:
    """A descriptor of a regular file, see `read_file`; opening it never waits.

    Raises:
        OSError: it can't be opened.
        ForeignFileError: it is not a regular file.
    """
    file = os.open(path, OPEN & ~os.O_NOFOLLOW)
    try:
        _require_regular(file, path.name)
        yield file
    finally:
        os.close(file)


def _require_regular(file: int, name: str) -> None:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise ForeignFileError(f"{name!r:.200} is not a regular file")


def _whole(file: int, name: str, most: int) -> bytes:
    """All bytes of a file, at most `most`."""
    read = bytearray()
    while part := os.read(file, min(PART, most + 1 - len(read))):
        read += part
        if len(read) > most:
            raise ForeignFileError(f"{name!r:.200} has more than {most:,} bytes")
    return bytes(read)


def _parts(file: int, size: int) -> Iterator[bytes]:
    """The content of a file, at most the size that it had: one that grows has an end, too."""
    while size > 0 and (part := os.read(file, min(PART, size))):
        size -= len(part)
        yield part
