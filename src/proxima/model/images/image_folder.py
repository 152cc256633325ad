"""The folder `images/` of a run: files that are checked by their names whenever they are read.

SHA-256.png    an image, named by the SHA-256 of its size and pixels
index.txt      the names, in the order of the images' numbers
index.crc32    how many names were written, and the CRC-32 of these; replaced after each write of the index
"""

import hashlib
import io
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.data import UserError
from proxima.data.image_tokens import IMAGES
from proxima.system.atomic_files import write_atomic

if TYPE_CHECKING:
    from PIL.Image import Image

INDEX = "index.txt"
CHECKSUM = "index.crc32"
LINE = 65  # bytes of a line of the index
RESTORE = "restore images/ from a copy, or start the run again: its prompts show images by their numbers"


def image_name(image: "Image") -> str:
    """The SHA-256 of an RGB image, which names its file."""
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()


def read_names(folder: Path) -> list[str]:
    """The names of the images in the order of their numbers; none where there is no index. An incomplete last line is
    left out: it may be written at this moment, or a kill cut it off.

    Raises:
        UserError: the index is not what was written: it lost names, or they have other places.
    """
    index = folder / INDEX
    recorded = _recorded(folder)  # first: the index grows before it
    try:
        if index.stat().st_size > LINE * IMAGES:
            raise UserError(f"{index} is longer than {IMAGES:,} lines, the most images of a run", remedy=RESTORE)
        content = index.read_bytes()
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise UserError(f"{index} can't be read ({error.strerror})", remedy=RESTORE) from None
    names = content.decode("ascii", errors="replace").rpartition("\n")[0].split()
    for number, name in enumerate(names, 1):
        if not re.fullmatch("[0-9a-f]{64}", name):
            raise UserError(
                f"{index}:{number} has {name!r:.80}, which names an image that does not exist", remedy=RESTORE
            )
    if recorded is not None:
        count, crc = recorded
        if len(names) < count:
            raise UserError(f"{index} has {len(names):,} of the {count:,} names that were written", remedy=RESTORE)
        if checksum(names[:count]) != crc:
            raise UserError(f"{index} differs from what was written: its lines are in another order", remedy=RESTORE)
    return names


def _recorded(folder: Path) -> tuple[int, int] | None:
    """The number of names that were written, and their CRC-32; None in a folder of an earlier version."""
    file = folder / CHECKSUM
    try:
        text = file.read_bytes()[:100].decode("ascii", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file} can't be read ({error.strerror})", remedy=RESTORE) from None
    match = re.fullmatch("([0-9]{1,9}) ([0-9a-f]{8})\n", text)
    if match is None:
        raise UserError(f"{file} is damaged", remedy=RESTORE)
    return int(match[1]), int(match[2], 16)


def checksum(names: Sequence[str], before: int = 0) -> int:
    """The CRC-32 of names that follow others, whose CRC-32 is `before`."""
    return zlib.crc32("".join(names).encode(), before)


def write_names(folder: Path, names: Sequence[str], written: int, crc: int) -> None:
    """Append the names after the first `written` ones to the index; on the disk when this returns.

    Args:
        crc: CRC-32 of all names.
    """
    with (folder / INDEX).open("r+b") as index:
        index.seek(LINE * written)  # a kill may have left a part of a line
        index.write("".join(f"{name}\n" for name in names[written:]).encode())
        index.truncate()
        index.flush()
        os.fsync(index.fileno())
    write_atomic(folder / CHECKSUM, f"{len(names)} {crc:08x}\n")


def read_image(folder: Path, name: str) -> tuple[bytes, "Image"]:
    """The file of an image, and the RGB image in it.

    Raises:
        UserError: it is gone or damaged, or shows another image.
    """
    from PIL import Image

    file = folder / f"{name}.png"
    remedy = "delete it, and resume: a row or an environment that shows it makes it again"
    try:
        content = file.read_bytes()
        image = Image.open(io.BytesIO(content), formats=("PNG",)).convert("RGB")
    except Exception as error:  # damaged files raise all kinds of errors
        raise UserError(f"{file} can't be read", remedy=remedy) from error
    if image_name(image) != name:
        raise UserError(f"{file} differs from the image that the run wrote", remedy=remedy)
    return content, image


def delete_images(folder: Path) -> None:
    """Delete what this module and its writer made in a folder, and the folder if nothing else is in it."""
    if folder.is_symlink() or not folder.is_dir():
        return folder.unlink(missing_ok=True)
    for file in folder.iterdir():
        if file.name in (INDEX, CHECKSUM) or re.fullmatch(r"[0-9a-f]{64}\.(png|part)", file.name):
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file)
            else:
                file.unlink()
    with suppress(OSError):  # it has files of the user's
        folder.rmdir()


def image_damage(folder: Path) -> list[str]:
    """What is wrong with the index and the images that it names; one line each."""
    try:
        names = read_names(folder)
    except UserError as error:
        return [error.reason]
    wrong = []
    for name in names:
        try:
            read_image(folder, name)
        except UserError as error:
            wrong.append(error.reason)
    return wrong
