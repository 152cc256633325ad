"""The images of a run as parts of a page."""

import base64
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


def thumbnails(run: Path, numbers: Sequence[int], side: int = 512) -> list[str]:
    """Images of a run by their numbers, as addresses that hold them, at most `side` pixels wide and high unless their
    files are small; empty for one that is gone or can't be read."""
    index = run / "images" / "index.txt"
    names = index.read_text(encoding="utf-8").split() if numbers and index.is_file() else []
    return [_address(run / "images", names[number], side) if number < len(names) else "" for number in numbers]


def _address(folder: Path, name: str, side: int) -> str:
    file = folder / f"{name}.png"
    if not re.fullmatch("[0-9a-f]{64}", name) or not file.is_file():
        return ""
    content = file.read_bytes() if file.stat().st_size <= 64 * side else _smaller(file, side)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}" if content else ""


def _smaller(file: Path, side: int) -> bytes:
    try:
        from proxima.task.image_files import open_image

        image: Image = open_image(str(file))
    except (ImportError, ValueError):  # no PIL, or a damaged file
        return b""
    image.thumbnail((side, side))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
