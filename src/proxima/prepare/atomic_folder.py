"""A folder that is created completely or not at all."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxima.data import UserError
from proxima.prepare.locate import CARD
from proxima.system.atomic_files import flush_to_disk, make_folder, remove_empty


@contextmanager
def atomic_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder next to `target` to write into; it replaces `target` when the block ends without an error. A link
    stays: the folder that it leads to is replaced.

    Files are flushed to disk before the rename. An error removes the unfinished folder and leaves `target` unchanged. A
    kill leaves it as `.NAME.….part`, and between two renames the former `target`, complete, as `.NAME.….old`. Of two
    processes that make the same folder, the second to finish is refused as if it had started later.

    Raises:
        UserError: `target` exists and `overwrite` is not set, or `target` is not a prepared folder.
    """
    refuse_existing(target, overwrite=overwrite)
    target = target.resolve()
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    former = part.with_suffix(".old")
    created = make_folder(target.parent)
    try:
        part.mkdir()
        yield part
        for path in (*part.iterdir(), part):
            flush_to_disk(path)
        refuse_existing(target, overwrite=overwrite)
        if target.exists():
            target.rename(former)
        part.rename(target)
        flush_to_disk(target.parent)
        shutil.rmtree(former, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        remove_empty(created)


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Raise `UserError` if `target` must not be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    remedy = "give another folder with --out"
    if not (target / CARD).is_file():
        raise UserError(f"{target} exists and is not prepared data (no {CARD} in it)", remedy=remedy)
    if not overwrite:
        raise UserError(f"{target} exists", remedy=f"take --overwrite to make it anew, or {remedy}")
