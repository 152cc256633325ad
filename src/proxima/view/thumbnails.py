"""The images of a run as parts of a page."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

from proxima.data import UserError
from proxima.model.images.folder import read_image, read_names


def thumbnails(run: Path, numbers: Sequence[int], side: int = 512) -> list[str]:
    """Images of a run by their numbers, as addresses that hold them, at most `side` pixels wide and high unless their
    files are small; empty for one that is gone or can't be read."""
    try:
        names = read_names(run / "images") if numbers else []
    except UserError:  # `proxima check` tells why
        names = []
    return [_address(run / "images", names[number], side) if 0 <= number < len(names) else "" for number in numbers]


def _address(folder: Path, name: str, side: int) -> str:
    try:
        content, image = read_image(folder, name)
    except (ImportError, UserError):  # no PIL, or a file that is gone or damaged
        return ""
    if len(content) > 64 * side:
        image.thumbnail((side, side))
        out = io.BytesIO()
        image.save(out, "PNG")
        content = out.getvalue()
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
