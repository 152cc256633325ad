"""Folders that are whole or absent, as the files of `atomic_files`."""

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from proxima.system.atomic_files import flush_to_disk, make_folder, ordinary_modes, remove_empty


@contextmanager
def atomic_folder(target: Path, check: Callable[[Path], object] = Path.exists) -> Iterator[Path]:
    """Yield a folder next to `target` to write into; it replaces `target` when the block ends without an error. A link
    stays: the folder that it leads to is replaced.

    Files are flushed to disk before the rename. An error removes the unfinished folder and leaves `target` unchanged. A
    kill leaves it as `.NAME.….part`, and between two renames the former `target`, complete, as `.NAME.….old`.

    Args:
        check: raises if `target` must not be replaced; called at the beginning and before the rename, so that of two
            processes that make the same folder, the second to finish is refused as if it had started later.
    """
    check(target)
    target = target.resolve()
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    former = part.with_suffix(".old")
    created = make_folder(target.parent)
    try:
        part.mkdir()
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
        remove_empty(created)
