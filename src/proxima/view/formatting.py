"""How a number is shown to a person: the one place that rounds. Every view uses it, so the terminal, the log and the
report agree."""

import math
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from proxima.lab.seed_statistics import SeedMean

NONE = "–"  # a value that is not there


def duration(seconds: float | None) -> str:
    """`40 ms`, `4.1 s`, `18 s`, `2m 40s`, `1h 05m`, `2d 03h`: two units at most."""
    if not _shown(seconds):
        return NONE
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    minutes = whole // 60
    return (
        f"{minutes // 60}h {minutes % 60:02d}m" if minutes < 1440 else f"{minutes // 1440}d {minutes // 60 % 24:02d}h"
    )


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
    """`290 tok/s`, `1,100 tok/s`, `128k tok/s`; one decimal below 10. Nothing done is no speed: 0 is `– tok/s`."""
    if not _shown(value) or value <= 0:
        return f"{NONE} tok/s"
    if value >= 99_950:
        return f"{value / 1000:,.0f}k tok/s"
    return f"{value:,.0f} tok/s" if value >= 9.95 else f"{value:.1f} tok/s"


def percent(share: float | None) -> str:
    """`0.4 %` of 0.004."""
    return f"{100 * share:.1f} %" if _shown(share) else f"{NONE} %"


def fixed(value: float | None, places: int = 2) -> str:
    """A number with so many places; never `-0.00`."""
    if not _shown(value):
        return NONE
    text = f"{value:.{places}f}"
    return text.lstrip("-") if not text.strip("-0.") else text


def signed(value: float | None, places: int = 3) -> str:
    """`+0.815`, `−0.020`."""
    if not _shown(value):
        return NONE
    text = fixed(abs(value), places)
    return f"{'−' if value < 0 and text.strip('0.') else '+'}{text}"


def plus_minus(value: "SeedMean | None", places: int = 3) -> str:
    """`0.940 ± 0.012`; the mean alone of a single seed."""
    if value is None:
        return NONE
    return fixed(value.mean, places) + (f" ± {fixed(value.half, places)}" if value.half is not None else "")


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
    """Foreign text on one line that a terminal can be given: control characters are shown, not obeyed.

    A model can write escape sequences that move the cursor or retitle the window. Line breaks become `⏎`; other control
    and format characters (bidirectional overrides too) their picture or code. Longer than `limit` (> 0): the end is cut
    off, with `…`.
    """
    out = []
    for char in text[: limit + 1] if limit else text:
        if char == "\n":
            out.append("⏎")
        elif char == "\t":
            out.append(" ")
        elif unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
            code = ord(char)
            out.append(chr(0x2400 + code) if code < 0x20 else f"<{code:04x}>")
        else:
            out.append(char)
    line = "".join(out)
    return line[: limit - 1] + "…" if limit and len(line) > limit else line


def sparkline(values: Sequence[float | None], width: int) -> str:
    """All values as at most `width` blocks, `▁▂▅█`, from the lowest to the highest; a space where there is none.

    More values than blocks: a block is the mean of its share of them.
    """
    if width <= 0:
        return ""
    shown = thinned(values, width)
    known = [v for v in shown if v is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    return "".join(" " if v is None else "▁▂▃▄▅▆▇█"[round(7 * (v - low) / span) if span > 0 else 3] for v in shown)


def thinned(values: Sequence[float | None], most: int) -> list[float | None]:
    """At most `most` values: means over equal shares, leaving out what is None or not finite; a share with nothing left
    is None."""
    parts = min(most, len(values))
    out: list[float | None] = []
    for i in range(parts):
        known = [v for v in values[len(values) * i // parts : len(values) * (i + 1) // parts] if _shown(v)]
        out.append(sum(known) / len(known) if known else None)
    return out


def _shown(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
