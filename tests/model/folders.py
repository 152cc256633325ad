"""Copies of model folders with a file changed."""

import json
import shutil
from pathlib import Path
from typing import Any


def edited(source: Path, folder: Path, change: bytes | dict[str, Any] | None, name: str = "config.json") -> str:
    """Copy `source` to `folder` with another content of a file, with changes to its JSON, or without it."""
    shutil.copytree(source, folder)
    file = folder / name
    if isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text()) | change).encode()
    file.unlink()  # it may be a link to the original
    if change is not None:
        file.write_bytes(change)
    return str(folder)
