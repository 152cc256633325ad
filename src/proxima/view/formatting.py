"""Formats numbers and makes foreign text safe for a terminal; shared by terminal, log and report."""

import math
import os
import shutil
import unicodedata
from typing import TextIO, TypeGuard

NONE = "–"  # a missing value
PATIENCE = 60.0  # seconds without output after which progress is reported if there is no terminal


def output_width(stream: TextIO) -> int | None:
    """Columns for text: `COLUMNS` if it is set, else those of a terminal; None for a file or a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    if stream.isatty():
        return shutil.get_terminal_size().columns
    return None


def duration(seconds: float | None) -> str:
    """`40 ms`, `4.1 s`, `18 s`, `2m 40s`, `1h 05m`, `2d 03h`: at most two units."""
    if not _shown(seconds):
        return NONE
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60}m {total % 60:02d}s"
    hours, minutes = divmod(total // 60, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    return f"{hours // 24}d {hours % 24:02d}h"


def count(value: float | None) -> str:
    """`2,048`."""
    return f"{value:,.0f}" if _shown(value) else NONE


def magnitude(value: float | None) -> str:
    """`134.5 M`, `7.2 B`, `812`: numbers of parameters or tokens."""
    if not _shown(value):
        return NONE
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.99995:
            return f"{value / size:.1f} {name}"
    return f"{value:.0f}"


def rate(value: float | None) -> str:
    """`290 tok/s`, `1,100 tok/s`, `128k tok/s`; one decimal below 10; `– tok/s` for 0."""
    if not _shown(value) or value <= 0:
        return f"{NONE} tok/s"
    if value >= 99_950:
        return f"{value / 1000:,.0f}k tok/s"
    if value >= 9.95:
        return f"{value:,.0f} tok/s"
    return f"{value:.1f} tok/s"


def gibibytes(size: float | None) -> str:
    """`61.2 GiB` for bytes."""
    return f"{size / 2**30:,.1f} GiB" if _shown(size) else NONE


def percent(share: float | None) -> str:
    """`0.4 %` for 0.004."""
    if _shown(share):
        return f"{100 * share:.1f} %"
    return f"{NONE} %"


def fixed(value: float | None, places: int = 2) -> str:
    """A number with a fixed number of decimals; never `-0.00`."""
    if not _shown(value):
        return NONE
    text = f"{value:.{places}f}"
    if not text.strip("-0."):
        return text.lstrip("-")
    return text


def signed(value: float | None, places: int = 3) -> str:
    """`+0.815`, `−0.020`."""
    if not _shown(value):
        return NONE
    text = fixed(abs(value), places)
    negative = value < 0 and text.strip("0.")  # not what is written as 0
    return f"−{text}" if negative else f"+{text}"


def significant(value: float | None, digits: int = 3) -> str:
    """`0.00312`, `1.24`, `12,400`, `3.1e-6`: for axes and quantities of any size."""
    if not _shown(value):
        return NONE
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    text = f"{value:,.{max(digits - 1 - exponent, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def printable(text: str, limit: int = 0) -> str:
    """Put foreign text on one line, safe for a terminal: a model can write escape sequences that move the cursor.

    Line breaks become `⏎`; other control and format characters (bidirectional overrides too) become their picture or
    code. Text longer than `limit` (> 0) is truncated, with `…`.
    """
    if limit:
        text = text[: limit + 1]  # a long text isn't read to its end
    line = "".join(map(_on_one_line, text))
    if limit and len(line) > limit:
        return line[: limit - 1] + "…"
    return line


def _on_one_line(char: str) -> str:
    if char == "\n":
        return "⏎"
    if char == "\t":
        return " "
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return _picture(ord(char))
    return char


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return f"<{code:04x}>"


# Control characters except tab and line break, and characters that change the direction of the surrounding text.
_UNSEEN = (*range(9), *range(11, 32), *range(127, 160), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F))
_PICTURES = {code: _picture(code) for code in (*_UNSEEN, *range(0x2066, 0x206A))}


def visible(text: str) -> str:
    """Make foreign text safe for a page: lines stay, invisible control characters become their picture or code."""
    return text.translate(_PICTURES)


def shortened(text: str, most: int) -> str:
    """The beginning of a text that is longer than `most` characters, with ` …`."""
    return text if len(text) <= most else text[:most] + " …"


def _shown(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def write_safely(stream: TextIO, text: str) -> None:
    """Write and flush; characters that the stream can't encode (an ASCII console) become `?`."""
    encoding = getattr(stream, "encoding", None) or "utf-8"  # whoever redirects the output may give a bare writer
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
