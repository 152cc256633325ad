"""A folder that is created completely or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from proxima.data import UserError
from proxima.prepare.locate import CARD
from proxima.system.atomic_files import flush_to_disk

try:
    import fcntl
except ImportError:  # Windows: two processes that write the same folder are not detected
    fcntl = None  # type: ignore[assignment]


@contextmanager
def atomic_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder next to `target` to write into; it replaces `target` when the block ends without an error.

    Files are flushed to disk before the rename. An error removes the unfinished folder and leaves `target` unchanged. A
    kill leaves at most `.NAME.part`, which the next call empties, or, between two renames, the former folder as
    `.NAME.before`, which the next call restores. A lock on `.NAME.part` admits one process at a time; the operating
    system releases it when the process ends.

    Raises:
        UserError: `target` exists and `overwrite` is not set, `target` is not a prepared folder, or another process is
            writing it.
    """
    part, before = (target.with_name(f".{target.name}.{suffix}") for suffix in ("part", "before"))
    created = [parent for parent in target.parents if not parent.exists()]
    try:
        with _locked(part, target):
            try:
                if before.is_dir() and not target.exists():
                    before.rename(target)
                refuse_existing(target, overwrite=overwrite)
                for stray in part.iterdir():
                    stray.unlink()
                yield part
                for path in (*part.iterdir(), part):
                    flush_to_disk(path)
                shutil.rmtree(before, ignore_errors=True)
                if target.exists():
                    target.rename(before)
                part.rename(target)
                flush_to_disk(target.parent)
                shutil.rmtree(before, ignore_errors=True)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    finally:
        with suppress(OSError):
            for parent in created if not target.exists() else ():
                parent.rmdir()


@contextmanager
def _locked(part: Path, target: Path) -> Iterator[None]:
    part.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if fcntl is not None:
            handle = os.open(part, os.O_RDONLY)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = f"{target} is being made by another process"
                raise UserError(message, remedy="wait for it, or give another folder with --out") from error
        yield


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Raise `UserError` if `target` must not be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    remedy = "give another folder with --out"
    if not (target / CARD).is_file():
        raise UserError(f"{target} exists and is not prepared data (no {CARD} in it)", remedy=remedy)
    if not overwrite:
        raise UserError(f"{target} exists", remedy=f"take --overwrite to make it anew, or {remedy}")
