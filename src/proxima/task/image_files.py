"""Opens the images of a row: a path, the bytes of a file, or an image that `datasets` has decoded."""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from proxima.data import UserError
from proxima.data.flow import IMAGE_PLACEHOLDER
from proxima.data.json_reader import json_type
from proxima.system.user_files import POINTER, POINTER_BOUND, PULL
from proxima.system.user_modules import require_package

if TYPE_CHECKING:
    from PIL.Image import Image

BYTES = 32 << 20  # most bytes of a file
PIXELS = 1 << 24  # most pixels of an image: 16.8 million
COUNT = 64  # most images of a row
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")


def image_list(value: Any, folder: Path, source: str) -> tuple[Any, ...]:
    """The images in a column's value, which is null, one image, or a list of at most `COUNT`, as `open_image` takes
    them; paths are relative to `folder`. UserError for anything else."""
    if value is None:
        return ()
    images = value if isinstance(value, list | tuple) else [value]
    if len(images) > COUNT:
        raise UserError(f"{source} has {len(images)} images; at most {COUNT} are shown", remedy="remove the row")
    return tuple(_stored(image, folder) for image in images)


def _stored(image: Any, folder: Path) -> Any:
    """An image of a column, as `open_image` takes it."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str):
        return str(folder / Path(image).expanduser())
    return image


def without_parts(chat: Any) -> tuple[Any, list[Any]]:
    """Return a chat with `IMAGE_PLACEHOLDER` in place of each image among the parts of its messages, and the images."""
    images = list[Any]()
    if not isinstance(chat, list | tuple) or not chat:
        return chat, images
    out = list[Any]()
    for message in chat:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
            for part in content:
                if part.get("type") == "image":
                    images.append(part.get("bytes") or part.get("path") or part.get("image"))
            if all(part.get("type") in ("text", "image") for part in content):
                message = {**message, "content": "".join(map(_text_of_part, content))}
        out.append(message)
    return out, images


def _text_of_part(part: Mapping[str, Any]) -> str:
    return IMAGE_PLACEHOLDER if part["type"] == "image" else str(part.get("text", ""))


def open_image(value: Any) -> "Image":
    """Open an image in RGB, rotated as its metadata says, with transparent parts on white.

    Args:
        value: a path, the bytes of a file, or an image of PIL.

    Raises:
        UserError: the image is missing, not in one of `FORMATS`, damaged, animated, of several pages or of floats in
            0 … 1, or larger than `BYTES` or `PIXELS`; one line. No more than these limits is decoded.
    """
    require_package("PIL", "images need", "proxima-rl[images]")
    from PIL import Image, ImageOps, UnidentifiedImageError

    shown = "an image"
    try:
        if isinstance(value, str):
            shown = f"image {value!r:.120}"
            if not Path(value).is_file():
                raise UserError(f"{shown} is not a file", remedy="give the path of one, or its bytes")
            with Path(value).open("rb") as file:
                value = file.read(BYTES + 1)
        if isinstance(value, bytes | bytearray):
            if len(value) > BYTES:
                raise _too_large(shown, f"has more than {BYTES:,} bytes")
            if value.startswith(POINTER):
                raise UserError(f"{shown} {POINTER_BOUND}", remedy=PULL)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of PIL, for what is refused below
                value = Image.open(io.BytesIO(value), formats=FORMATS)
        if not isinstance(value, Image.Image):
            raise UserError(f"{shown} is {json_type(value)}", remedy="give a path, bytes, or an image of PIL")
        if value.width * value.height > PIXELS or not value.width * value.height:
            raise _too_large(shown, f"has {value.width} x {value.height} pixels; at most {PIXELS:,}")
        if _has_second_frame(value):
            raise UserError(f"{shown} has several frames or pages", remedy="give one of them")
        value = _eight_bits(ImageOps.exif_transpose(value), shown)
        if value.has_transparency_data:
            value = Image.alpha_composite(Image.new("RGBA", value.size, "white"), value.convert("RGBA"))
        image: Image.Image = value.convert("RGB")
        return image
    except UserError:
        raise
    except UnidentifiedImageError:
        raise UserError(f"{shown} can't be read: it is not one of {', '.join(FORMATS)}", remedy="repair it") from None
    except Exception as error:  # damaged files raise all kinds of errors
        reason = " ".join(str(error).split())[:100]
        raise UserError(f"{shown} can't be read: {reason or type(error).__name__}", remedy="repair it") from error


def _has_second_frame(image: "Image") -> bool:
    """True for an animation or several pages. They are not counted, because a small file may have 60,000."""
    try:
        image.seek(1)
    except EOFError:
        return False
    return True


def _eight_bits(image: "Image", shown: str) -> "Image":
    """The image with 8 bits per channel; Pillow would turn all but the darkest 16-bit values white."""
    from PIL.Image import fromarray

    if image.mode in ("I", "F"):
        values = np.asarray(image)
        remedy = "save it with 8 bits a channel"
        low = values.min()  # NaN if there is one
        high = values.max()
        if not (low >= 0 and high <= 255):
            raise UserError(f"{shown} has values outside 0 … 255", remedy=remedy)
        if image.mode == "F" and 0 < high <= 1:
            what = f"{shown} has float values in 0 … 1, which 8 bits would show as black"
            raise UserError(what, remedy=f"multiply it by 255 and {remedy}")
    if not image.mode.startswith("I;16"):
        return image
    return fromarray((np.asarray(image) / 257).round().astype(np.uint8))


def _too_large(shown: str, said: str) -> UserError:
    return UserError(f"{shown} {said}", remedy="make it smaller, or remove the row")
