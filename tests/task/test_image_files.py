"""Images of rows: what is shown is normalised, and what is hostile is one line."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from proxima.data import UserError
from proxima.task.image_files import BYTES, image_list, open_image
from tests.tiny_images import picture


def content(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png(width, height, data=b"", depth=8, color=2):
    """A PNG with this header, whatever its data is."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


SMALL = picture(0, 24, 18)
WHOLE = {kind: content(SMALL, kind) for kind in ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF")}
BOMB = zlib.compress(bytes(3 * 60_000 * 1000), 1)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP"])
def test_lossless_formats_keep_every_pixel(kind):
    assert open_image(WHOLE[kind]).tobytes() == SMALL.tobytes()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I", "F", "YCbCr"])
def test_modes_become_rgb(mode):
    shown = open_image(SMALL.convert("RGB").convert(mode) if mode != "LA" else SMALL.convert("L").convert("LA"))
    assert (shown.mode, shown.size) == ("RGB", SMALL.size)


def test_orientation_and_transparency_are_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    (tmp_path / "turned.jpg").write_bytes(content(SMALL, "JPEG", exif=exif))
    assert open_image(str(tmp_path / "turned.jpg")).size == (18, 24)
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert np.asarray(open_image(content(clear))).min() == 255


def test_a_column_has_none_one_or_several_with_paths_beside_the_data(tmp_path):
    assert image_list(None, tmp_path, "row") == ()
    assert image_list("a.png", tmp_path, "row") == (str(tmp_path / "a.png"),)
    assert image_list([{"bytes": b"x", "path": None}, {"bytes": None, "path": "/b"}], tmp_path, "row") == (b"x", "/b")


HOSTILE = {
    "nothing": b"",
    "text": b"not an image",
    "a svg": b"<svg xmlns='http://www.w3.org/2000/svg'><script/></svg>",
    "an eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9999999 9999999\n",
    "a huge header": png(2**31 - 1, 2**31 - 1),
    "a bomb": png(60_000, 1000, BOMB),
    "no pixels": png(0, 10),
    "a bad depth": png(10, 10, depth=7),
    "no data": png(10, 10),
    "noise in its data": png(10, 10, b"\x00\xff\x12"),
    "too many bytes": b"\x89PNG" + bytes(BYTES),
    "an animation": content(SMALL, "GIF", save_all=True, append_images=[picture(1, 24, 18)] * 3),
    "an animated webp": content(SMALL, "WEBP", save_all=True, append_images=[picture(1, 24, 18)]),
    "an animated png": content(SMALL, "PNG", save_all=True, append_images=[picture(1, 24, 18)]),
    "32 bits": Image.new("I", (8, 8), 70_000),
    "floats": Image.new("F", (8, 8), -1.5),
    "floats in 0 … 1": Image.new("F", (8, 8), 0.5),
    "a float TIFF in 0 … 1": content(Image.new("F", (8, 8), 1.0), "TIFF"),
    "a NaN": Image.fromarray(np.array([[0, np.nan], [3, 4]], np.float32)),
    "a TIFF of two pages": content(SMALL, "TIFF", save_all=True, append_images=[SMALL]),
    "no file": "/no/such/file.png",
    "a device": "/dev/zero",
    "a folder": "/",
    "a name with a zero": "a\0b.png",
    "a long name": "x" * 5000,
    "a number": 3,
    "nothing at all": None,
    **{f"half a {kind}": whole[: len(whole) // 2] for kind, whole in WHOLE.items()},
    **{f"a {kind} of noise": whole[:12] + bytes(range(256)) * 4 for kind, whole in WHOLE.items()},
    **{f"the head of a {kind}": whole[:5] for kind, whole in WHOLE.items() if kind != "BMP"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_one_line(name):
    with pytest.raises(UserError) as raised:
        open_image(HOSTILE[name])
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_many_pages_are_not_counted():
    """Pillow reads the header of every page to count them: one that stands before itself in the file would never end,
    and 60,000 took more than a minute."""
    two = HOSTILE["a TIFF of two pages"]
    seen = []

    class Watched(io.BytesIO):
        def seek(self, *place):
            seen.append(place)
            return super().seek(*place)

    image = Image.open(Watched(content(SMALL, "TIFF", save_all=True, append_images=[SMALL] * 40)))
    with pytest.raises(UserError, match="an image has several frames or pages; give one of them"):
        open_image(image)
    few = len(seen)
    with Image.open(Watched(two)) as same, pytest.raises(UserError):
        open_image(same)
    assert few == len(seen) - few  # as many for 41 pages as for two


def test_floats_are_what_eight_bits_would_be():
    assert np.asarray(open_image(Image.new("F", (2, 2), 200.0))).max() == 200
    assert np.asarray(open_image(Image.new("F", (2, 2), 0.0))).max() == 0  # black, in any range
    with pytest.raises(UserError, match="float values in 0 … 1, which 8 bits would show as black; multiply it by 255"):
        open_image(HOSTILE["floats in 0 … 1"])


def test_sixteen_bits_become_eight():
    ramp = np.linspace(0, 65535, 256, dtype=np.uint16)[None].repeat(4, 0)
    image = np.asarray(open_image(content(Image.fromarray(ramp), "PNG")))
    assert image.shape == (4, 256, 3) and np.abs(image[0, :, 0] - np.arange(256.0)).max() <= 1
