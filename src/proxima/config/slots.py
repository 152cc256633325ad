"""The annotation of config fields that a preset may fill, and two bounds that several sections check."""

from dataclasses import dataclass
from typing import Any

from proxima.data import require
from proxima.data.slot import Slot as Slot


@dataclass(frozen=True)
class Presets:
    """Marks a field that a preset's name may fill: `algorithm: cppo`, or `{preset: cppo, ...overrides}`."""

    table: str


def require_at_least(config: Any, minimum: int, *fields: str, remedy: str = "") -> None:
    """Raise `FieldError` for the first of the fields that is below the minimum."""
    for name in fields:
        value = getattr(config, name)
        require(value >= minimum, name, value, f"must be >= {minimum}", remedy=remedy)


def require_plain_folder(folder: str | None) -> None:
    """Raise `FieldError` for a folder name with control characters."""
    plain = folder is None or folder.isprintable()
    require(plain, "folder", folder, "must not have control characters, which a terminal obeys")
