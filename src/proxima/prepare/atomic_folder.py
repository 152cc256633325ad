"""A folder that appears whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from proxima.data import UserError
from proxima.prepare.locate import CARD

try:
    import fcntl
except ImportError:  # Windows has none: two that make one folder are not caught there
    fcntl = None  # type: ignore[assignment]


@contextmanager
def atomic_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder beside `target` to write into; it takes the place of `target` when the block ends without an error.

    Files reach the disk before the rename. An error inside removes the unfinished folder and leaves `target` as it was;
    a kill leaves at most a stray `.NAME.part-PID`, which the next one removes, or, between two renames, the former
    folder as `.NAME.before`, which the next one puts back. A lock, `.NAME.lock`, lets one at a time do so; it goes with
    the process, however that ends.

    Raises:
        ValueError: `target` exists and `overwrite` is not set, it is no prepared folder, or another process is making
            it.
    """
    part, before = (target.with_name(f".{target.name}.{suffix}") for suffix in (f"part-{os.getpid()}", "before"))
    made = [above for above in target.parents if not above.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(target):
            if before.is_dir() and not target.exists():
                before.rename(target)
            refuse_existing(target, overwrite=overwrite)
            for left in _parts(target):  # we hold the lock: nobody is writing into one
                shutil.rmtree(left, ignore_errors=True)
            part.mkdir()
            try:
                yield part
                _put(part, target, before)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    finally:
        with suppress(OSError):  # empty folders above that were made for nothing
            for above in made if not target.exists() else ():
                above.rmdir()


def _put(part: Path, target: Path, before: Path) -> None:
    """The finished folder in the place of `target`."""
    for path in part.iterdir():
        _to_disk(path)
    _to_disk(part)
    shutil.rmtree(before, ignore_errors=True)
    if target.exists():
        target.rename(before)
    part.rename(target)
    _to_disk(target.parent)
    shutil.rmtree(before, ignore_errors=True)


def _parts(target: Path) -> list[Path]:
    """Unfinished folders for `target`."""
    name = f".{target.name}.part"
    return [
        path for path in target.parent.iterdir() if path.name == name or path.name.removeprefix(name + "-").isdecimal()
    ]


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One at a time makes `target`."""
    path = target.with_name(f".{target.name}.lock")
    while True:
        with path.open("wb") as lock:
            if fcntl is not None:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise UserError(
                        f"{target} is being made by another process; wait for it, or give another folder with --out"
                    ) from error
                if not _is_at(
                    lock.fileno(), path
                ):  # the one before us has just removed it: what we hold has no name any more
                    continue
            try:
                yield
            finally:
                with suppress(OSError):  # while we hold it, so that nobody's lock is taken away
                    path.unlink()
            return


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Nothing that is there is lost by accident.

    Raises:
        ValueError: as `atomic_folder`.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / CARD).is_file():
        raise UserError(f"{target} exists and is no prepared data (no {CARD} in it); give another folder with --out")
    if not overwrite:
        raise UserError(f"{target} exists; take --overwrite to make it anew, or give another folder with --out")


def _to_disk(path: Path) -> None:
    """Flush a file or a folder's names; nothing where such a handle can't be flushed (Windows)."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
