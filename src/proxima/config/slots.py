"""The annotation of config fields that hold specs, and two bounds that several sections check."""

from typing import Any

from proxima.data import require
from proxima.data.kinds import Slot as Slot


def require_at_least(config: Any, minimum: int, *fields: str, remedy: str = "") -> None:
    """Raise `FieldError` for the first of the fields that is below the minimum."""
    for name in fields:
        value = getattr(config, name)
        require(value >= minimum, name, value, f"must be >= {minimum}", remedy=remedy)


def require_plain_folder(folder: str | None) -> None:
    """Raise `FieldError` for a folder name with control characters."""
    plain = folder is None or folder.isprintable()
    require(plain, "folder", folder, "must not have control characters, which a terminal obeys")
