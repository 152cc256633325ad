"""Line and bar charts as inline SVG: no library, no network, colours from the page's CSS variables so that light and
dark both work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup, escape

from proxima.view.formatting import significant, thinned

POINTS = 400  # most points drawn of a line; a longer run is averaged down to this

Point = tuple[float, float | None]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one share of the bars.

    Args:
        name: for the legend.
        points: (step, value); None is a gap.
        color: a CSS colour, `var(--a)`.
        smooth: also draw the running mean, and the values themselves faintly.
        spread: for each point its (low, high), drawn as a whisker; such a series is drawn as dots.
        band: for each point its (low, high), drawn as an area behind the line.
        dash: SVG dash pattern, `6 3`; empty for a whole line.
        dots: also a dot at each point, where the points are few and what lies between was not measured.
    """

    name: str
    points: Sequence[Point]
    color: str = "var(--a)"
    smooth: bool = False
    spread: Sequence[tuple[float, float]] = ()
    band: Sequence[tuple[float, float]] = ()
    dash: str = ""
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The plot's size in CSS pixels, and the data range that it shows."""

    width: int = 360
    height: int = 170
    left: int = 46
    right: int = 10
    top: int = 8
    bottom: int = 22
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return self.left + (value - self.x_low) / ((self.x_high - self.x_low) or 1.0) * (
            self.width - self.left - self.right
        )

    def y(self, value: float) -> float:
        inner = self.height - self.top - self.bottom
        return self.height - self.bottom - (value - self.y_low) / ((self.y_high - self.y_low) or 1.0) * inner


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) that span `low` … `high`: the first is <= low, the last >=
    high."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        span = abs(low) or 1.0
        low, high = low - span / 2, high + span / 2
        span = high - low
    raw = span / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    zero: bool = False,
    unit_interval: bool = False,
    within: tuple[float, float] | None = None,
    **size: int,
) -> Markup:
    """Lines over the steps.

    Args:
        series: what to draw; points without a finite value leave a gap.
        label: what a screen reader says.
        zero: the axis begins at 0.
        unit_interval: the axis is 0 … 1.
        within: what the axis shows of the areas; the rest of them runs off the plot. None shows all.
        size: width, height, left, bottom … of the `Frame`.
    """
    drawn = [_thinned(s) for s in series]
    values = [v for s in drawn for _, v in s.points if v is not None] + [
        v for s in drawn for pair in s.spread for v in pair
    ]
    least, most = within or (-math.inf, math.inf)
    values += [min(max(v, least), most) for s in drawn for pair in s.band for v in pair]
    steps = [x for s in drawn for x, _ in s.points]
    if not values:
        return Markup("")
    low, high = (0.0, 1.0) if unit_interval else (min(values), max(values))
    if zero:
        low, high = min(low, 0.0), max(high, 0.0) if low < 0 else high or 1.0
    levels = ticks(low, high, 4)
    frame = Frame(x_low=min(steps), x_high=max(steps), y_low=levels[0], y_high=levels[-1], **size)
    parts = [_axes(frame, levels)]
    for i, s in enumerate(drawn):
        if s.spread:
            lines = [_whisker(frame, s, j) for j in range(len(s.points))]
        elif s.smooth and len(s.points) >= 12:
            lines = [
                _path(frame, s.points, s.color, "raw"),
                _path(frame, running_mean(s.points), s.color, "line", s.dash),
            ]
        else:
            lines = [_band(frame, s), _path(frame, s.points, s.color, "line", s.dash), _dots(frame, s)]
        parts.append(f'<g data-series="{i}">{"".join(lines)}</g>')
    return _svg(frame, parts, label)


def bar_chart(series: Sequence[Series], *, label: str, most: int = 60, **size: int) -> Markup:
    """Stacked bars over the steps, each series on top of the one before; runs of more than `most` steps are averaged
    into as many bars."""
    steps = [x for x, _ in series[0].points] if series else []
    if not steps:
        return Markup("")
    columns = [[v or 0.0 for v in thinned([v for _, v in s.points], most)] for s in series]
    totals = [sum(column) for column in zip(*columns, strict=True)]
    levels = ticks(0.0, max(totals) or 1.0, 4)
    frame = Frame(x_low=steps[0], x_high=steps[-1], y_low=0.0, y_high=levels[-1], **size)
    slot = (frame.width - frame.left - frame.right) / len(totals)
    parts, base = [_axes(frame, levels)], [0.0] * len(totals)
    for s, column in zip(series, columns, strict=True):
        for i, value in enumerate(column):
            top, bottom = frame.y(base[i] + value), frame.y(base[i])
            base[i] += value
            if bottom - top > 0.05:
                x, width = frame.left + i * slot, max(slot - 1, slot * 0.8)
                parts.append(
                    f'<rect x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" height="{bottom - top:.2f}" '
                    f'fill="{escape(s.color)}"/>'
                )
    return _svg(frame, parts, label)


def running_mean(points: Sequence[Point]) -> list[Point]:
    """The mean over the tenth of the points around each (three at least; at the ends, over those that are there)."""
    half = max(1, len(points) // 20)
    out: list[Point] = []
    for i, (x, value) in enumerate(points):
        known = [v for _, v in points[max(i - half, 0) : i + half + 1] if v is not None]
        out.append((x, sum(known) / len(known) if known and value is not None else None))
    return out


def _thinned(series: Series) -> Series:
    finite: list[Point] = [(x, v if v is not None and math.isfinite(v) else None) for x, v in series.points]
    if series.spread or len(finite) <= POINTS:
        return replace(series, points=finite)
    values = thinned([v for _, v in finite], POINTS)
    places = [len(finite) * (2 * i + 1) // (2 * POINTS) for i in range(POINTS)]
    points = [(finite[place][0], value) for place, value in zip(places, values, strict=True)]
    return replace(series, points=points, band=[series.band[place] for place in places] if series.band else ())


def _axes(frame: Frame, levels: Sequence[float]) -> str:
    right, foot, parts = frame.width - frame.right, frame.height - 6, []
    for level in levels:
        y = frame.y(level)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y:.2f}" y2="{y:.2f}"/>')
        parts.append(
            f'<text x="{frame.left - 6}" y="{y + 4:.2f}" text-anchor="end">{escape(significant(level))}</text>'
        )
    if frame.x_high > frame.x_low:
        for tick in [
            t for t in ticks(frame.x_low, frame.x_high, 6) if frame.x_low <= t <= frame.x_high and t == int(t)
        ]:
            parts.append(f'<text x="{frame.x(tick):.2f}" y="{foot}" text-anchor="middle">{tick:,.0f}</text>')
    else:
        parts.append(f'<text x="{frame.left}" y="{foot}">{frame.x_low:,.0f}</text>')
    return "".join(parts)


def _band(frame: Frame, series: Series) -> str:
    """The area between low and high; what lies beyond the axis is cut along the plot's edge, at the place where the
    true line leaves it."""
    if not series.band:
        return ""
    steps = [x for x, _ in series.points]
    edges = [_inside(steps, [pair[side] for pair in series.band], frame.y_low, frame.y_high) for side in (1, 0)]
    points = [f"{frame.x(x):.2f},{frame.y(y):.2f}" for x, y in (*edges[0], *reversed(edges[1]))]
    return f'<polygon class="band" fill="{escape(series.color)}" points="{" ".join(points)}"/>'


def _inside(steps: Sequence[float], values: Sequence[float], low: float, high: float) -> list[tuple[float, float]]:
    """A line's points, with one more wherever it crosses `low` or `high`, all brought between the two."""
    found: list[tuple[float, float]] = []
    for i, (x, y) in enumerate(zip(steps, values, strict=True)):
        if i:
            before, last = steps[i - 1], values[i - 1]
            crossed = [limit for limit in (low, high) if min(last, y) < limit < max(last, y)]
            found += [
                (before + (x - before) * (limit - last) / (y - last), limit)
                for limit in sorted(crossed, reverse=y < last)
            ]
        found.append((x, min(max(y, low), high)))
    return found


def _dots(frame: Frame, series: Series) -> str:
    known = [(x, value) for x, value in series.points if value is not None] if series.dots else []
    return "".join(
        f'<circle cx="{frame.x(x):.2f}" cy="{frame.y(y):.2f}" r="2.6" fill="{escape(series.color)}"/>' for x, y in known
    )


def _path(frame: Frame, points: Sequence[Point], color: str, kind: str, dash: str = "") -> str:
    """A line with its gaps; a point with no neighbour is a dot."""
    pieces: list[list[str]] = [[]]
    for x, value in points:
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{frame.x(x):.2f},{frame.y(value):.2f}")
    parts = []
    for piece in pieces:
        if len(piece) == 1:
            left, top = piece[0].split(",")
            parts.append(f'<circle cx="{left}" cy="{top}" r="2" fill="{escape(color)}"/>')
        elif piece:
            dashed = f' stroke-dasharray="{escape(dash)}"' if dash else ""
            parts.append(f'<polyline class="{kind}" stroke="{escape(color)}"{dashed} points="{" ".join(piece)}"/>')
    return "".join(parts)


def _whisker(frame: Frame, series: Series, index: int) -> str:
    step, value = series.points[index]
    if value is None:
        return ""
    (low, high), x, color = series.spread[index], frame.x(step), escape(series.color)
    return (
        f'<line class="whisker" stroke="{color}" x1="{x:.2f}" x2="{x:.2f}" y1="{frame.y(low):.2f}" '
        f'y2="{frame.y(high):.2f}"/>'
        f'<circle class="dot" cx="{x:.2f}" cy="{frame.y(value):.2f}" r="4" fill="{color}"/>'
    )


def _svg(frame: Frame, parts: Sequence[str], label: str) -> Markup:
    box = f'viewBox="0 0 {frame.width} {frame.height}"'
    plot = (
        f'data-left="{frame.left}" data-right="{frame.width - frame.right}" data-from="{frame.x_low}" '
        f'data-to="{frame.x_high}"'
    )
    plot += (
        f' data-top="{frame.top}" data-bottom="{frame.height - frame.bottom}" data-low="{frame.y_low}" '
        f'data-high="{frame.y_high}"'
    )
    ruler = f'<line class="ruler" y1="{frame.top}" y2="{frame.height - frame.bottom}" visibility="hidden"/>'
    return Markup(
        f'<svg class="chart" role="img" aria-label="{escape(label)}" {box} {plot}>{"".join(parts)}{ruler}</svg>'
    )
