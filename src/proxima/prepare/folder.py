"""A folder that appears whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from proxima.prepare.origin import CARD


@contextmanager
def whole_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder beside `target` to write into; it takes the place of `target` when the block ends without an error.

    Files reach the disk before the rename. An error inside removes the unfinished folder and leaves `target` as it was; a kill leaves at
    most a stray `.NAME.part`, which the next one replaces, or, between two renames, the former folder as `.NAME.before`, which the next
    one puts back.

    Raises:
        ValueError: `target` exists and `overwrite` is not set, or it is no prepared folder.
    """
    part, before = (target.with_name(f".{target.name}.{suffix}") for suffix in ("part", "before"))
    if before.is_dir() and not target.exists():
        before.rename(target)
    refuse_if_taken(target, overwrite=overwrite)
    made = [above for above in target.parents if not above.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        for path in part.iterdir():
            _to_disk(path)
        _to_disk(part)
        shutil.rmtree(before, ignore_errors=True)
        if target.exists():
            target.rename(before)
        part.rename(target)
        _to_disk(target.parent)
        shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):  # empty folders above that were made for nothing
            for above in made if not target.exists() else ():
                above.rmdir()


def refuse_if_taken(target: Path, *, overwrite: bool) -> None:
    """Nothing that is there is lost by accident.

    Raises:
        ValueError: as `whole_folder`.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / CARD).is_file():
        raise ValueError(f"{target} exists and is no prepared data (no {CARD} in it); give another folder with --out")
    if not overwrite:
        raise ValueError(f"{target} exists; take --overwrite to make it anew, or give another folder with --out")


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
