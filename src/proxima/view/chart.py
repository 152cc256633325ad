"""All charts, drawn by matplotlib: lines and bars for pages as SVG text, and figures in separate files. Colours are CSS
variables, so that a chart follows the page's light or dark scheme.

matplotlib writes plain hex colours; each name of `PALETTE` has a placeholder colour that becomes `var(--name)` in the
text. matplotlib is imported when the first chart is drawn.
"""

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from markupsafe import Markup, escape

from proxima.data import UserError
from proxima.data.atomic_files import write_atomic
from proxima.lab.running_mean import running_mean
from proxima.view.formatting import significant, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

POINTS = 400  # maximum points drawn of a line; longer ones are averaged down to this number
BARS = 60
PALETTE = {  # CSS variable: its colour on a light and on a dark page
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1a1c20", "#e8e9ec"),
    "muted": ("#646a73", "#9ba2ac"),
    "grid": ("#ecece7", "#262a31"),
    "a": ("#2563eb", "#7aaefc"),
    "b": ("#c2500c", "#f2a164"),
    "c": ("#0f7f74", "#55c8b5"),
    "d": ("#7c3aed", "#b89af7"),
    "e": ("#9aa0a8", "#737a85"),
    "k0": ("#1f6fd1", "#74aefc"),
    "k1": ("#d1570a", "#fb9a56"),
    "k2": ("#0c8a5f", "#4fd1a0"),
    "k3": ("#b4378f", "#ee8fd0"),
    "k4": ("#8a6d00", "#dcc04a"),
    "k5": ("#6b4fd8", "#b09cff"),
    "k6": ("#3f4650", "#d3d7dd"),
    "k7": ("#c02b3a", "#ff8089"),
}
FONT = 'system-ui, -apple-system, "Segoe UI", sans-serif'
STEPS = [1, 2, 5, 10]  # ticks are at multiples of these

Point = tuple[float, float | None]
Margins = tuple[float, float, float, float]  # left, right, top and bottom, in pixels
Color = Callable[[str], str]  # a name of `PALETTE` → a colour of matplotlib


class Drawing(Protocol):
    """A figure in a separate file. Subclasses define its title and its size in CSS pixels, and draw it."""

    salt: ClassVar[str] = "figure"
    font: ClassVar[int] = 12
    simplify: ClassVar[bool] = False  # drop points on straight lines

    @property
    def title(self) -> str: ...

    @property
    def size(self) -> tuple[float, float]: ...

    def draw(self, figure: "Figure", color: Color) -> None: ...

    @contextmanager
    def opened(self, color: Color) -> "Iterator[Figure]":
        """Yield the drawn figure; it must be saved within this context."""
        with new_figure(self.size, self.salt, color=color, font=self.font, simplify=self.simplify) as figure:
            self.draw(figure, color)
            yield figure


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one part of stacked bars."""

    points: Sequence[Point]  # (step, value); None is a gap
    color: str = "a"  # a name of `PALETTE`
    smooth: bool = False  # also draw the running mean, and the values themselves faintly
    spread: Sequence[tuple[float, float]] = ()  # (low, high) of each point's whisker; such a series is drawn as dots
    band: Sequence[tuple[float, float]] = ()  # (low, high) of each point, drawn as an area behind the line
    dash: Sequence[float] = ()  # lengths of dashes and gaps in pixels; empty for a solid line
    dots: bool = False  # draw a dot at each point as well

    @property
    def x(self) -> list[float]:
        return [x for x, _ in self.points]

    @property
    def y(self) -> list[float]:
        return [math.nan if value is None else value for _, value in self.points]


def variable(name: str) -> str:
    """Return the placeholder colour that is replaced by `var(--name)` in the SVG text."""
    return f"#fe00{list(PALETTE).index(name):02x}"


def line_style(dash: Sequence[float]) -> Any:
    """Return matplotlib's style for a line with these dashes and gaps, in pixels; solid if empty."""
    return (0, tuple(dash)) if dash else "-"


def palette_css(selector: str) -> str:
    """Return the CSS definitions of all colours for both colour schemes."""
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in PALETTE.items()) for i in (0, 1))
    return f"{selector} {{ {light} }}\n@media (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}\n"


@contextmanager
def new_figure(
    size: tuple[float, float], salt: str, *, color: Color = variable, font: int = 11, simplify: bool = False
) -> "Iterator[Figure]":
    """Create a matplotlib figure whose units are CSS pixels.

    Args:
        salt: makes the ids of clip paths unique among the charts of a page.
        simplify: drop points on straight lines; the page's script needs them all.
    """
    import matplotlib
    from matplotlib.figure import Figure

    sides = {f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")}
    colors = {"text.color": "ink", "grid.color": "grid", "axes.labelcolor": "muted", "axes.titlecolor": "ink"}
    colors |= {"xtick.labelcolor": "muted", "ytick.labelcolor": "muted"}
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": salt, "path.simplify": simplify, "font.size": font}
    settings |= {"font.family": "DejaVu Sans", "axes.grid": True, "axes.grid.axis": "y", "grid.linewidth": 1.0}
    settings |= {"xtick.bottom": False, "ytick.left": False, "axes.facecolor": "none", "figure.facecolor": "none"}
    settings |= {"axes.axisbelow": True, "axes.unicode_minus": False, "text.parse_math": False, "figure.dpi": 72.0}
    settings |= {"axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlesize": font}
    settings |= {"lines.scale_dashes": False} | sides | {key: color(name) for key, name in colors.items()}
    with matplotlib.rc_context(settings):
        yield Figure(figsize=(size[0] / 72, size[1] / 72))


def pixel_size(figure: "Figure") -> tuple[float, float]:
    """Return width and height in CSS pixels."""
    width, height = 72 * figure.get_size_inches()
    return float(width), float(height)


def page_svg(figure: "Figure", label: str, data: str = "", inner: str = "") -> Markup:
    """Return the figure as an element of a page.

    Args:
        label: text for screen readers.
        data: further attributes.
        inner: markup at the end of the element.
    """
    return Markup(_svg_text(figure, f'class="chart" aria-label="{escape(label)}"{data}', inner))


def _svg_text(figure: "Figure", attributes: str, inner: str = "") -> str:
    """Return the figure as an `<svg>` element: colours as variables, the page's fonts, no ids but those it refers to.

    Artists with a gid `line-0` become `<g class="line" data-series="0">`.
    """
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = stream.getvalue().partition("</defs>")[2]
    path = re.compile(r'(?<= d=")[^"]*')  # its data with two decimals, on one line
    text = path.sub(lambda m: " ".join(re.sub(r"(\.\d\d)\d+", r"\1", m[0]).split()), text)
    text = re.sub(r' id="([a-z]+)-(\d+)"', r' class="\1" data-series="\2"', text)
    text = re.sub(r' id="[\w.]+_\d+"| transform="rotate\(-0 [^"]*"|(?<="| )font-family: [^;"]*;? ?', "", text)
    text = re.sub(r"#fe00([0-9a-f]{2})", lambda m: f"var(--{list(PALETTE)[int(m[1], 16)]})", text)
    text = re.sub(r">\s+<", "><", text.replace("xlink:href", "href")).strip().removesuffix("</svg>")
    width, height = pixel_size(figure)
    return f'<svg role="img" viewBox="0 0 {width:g} {height:g}" {attributes}>{text}{inner}</svg>'


def svg_file(drawing: Drawing) -> str:
    """Return the figure as the text of an .svg file, which includes its title and its colours for light and dark."""
    width, height = drawing.size
    style = f"{palette_css('svg')}svg {{ font-family: {FONT}; }} path {{ stroke-linejoin: round; }}"
    with drawing.opened(variable) as figure:
        figure.patch.set_facecolor(variable("paper"))
        text = _svg_text(figure, f'xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"')
    start = text.index(">") + 1
    return f"{text[:start]}<title>{escape(drawing.title)}</title><style>{style}</style>{text[start:]}\n"


def write_figure(drawing: Drawing, out: Path | str) -> Path:
    """Write a figure to `out`, an .svg or a .png, and return the path. Raises: UserError for another suffix."""
    out = Path(out)
    suffix = out.suffix.lower()
    if suffix == ".svg":
        write_atomic(out, svg_file(drawing))
    elif suffix == ".png":
        stream = io.BytesIO()
        with drawing.opened(lambda name: PALETTE[name][0]) as figure:
            figure.savefig(stream, format="png", dpi=150, facecolor=PALETTE["paper"][0])
        write_atomic(out, stream.getvalue())
    else:
        raise UserError(f"{out} has {f'the suffix {suffix}' if suffix else 'no suffix'}; write an .svg or a .png")
    return out


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    zero: bool = False,
    ends: tuple[float, float] | None = None,
    within: tuple[float, float] | None = None,
    size: tuple[int, int] = (360, 170),
) -> Markup:
    """Draw lines over the steps, for a page; empty if there is nothing to draw.

    Args:
        label: text for screen readers.
        zero: the axis starts at 0.
        ends: ends of the axis; values beyond them are drawn at the ends. None: those of the values.
        within: range that the axis shows at least; bands are cut off at its edge. None: all points and bands.
    """
    drawn = [_prepared(s, ends or (-math.inf, math.inf)) for s in series]
    if (limits := _limits(drawn, zero, within)) is None:
        return Markup("")
    with new_figure(size, label) as figure:
        axes = chart_axes(figure, [x for s in drawn for x in s.x], ends or limits)
        for i, s in enumerate(drawn):
            draw_series(axes, s, i)
        return _with_ruler(figure, axes, label)


def bar_chart(series: Sequence[Series], *, label: str, most: int = BARS, size: tuple[int, int] = (360, 170)) -> Markup:
    """Draw stacked bars over the steps, each series on top of the previous one; more than `most` steps are averaged
    into that many bars."""
    if not series or not series[0].points:
        return Markup("")
    parts = [[v or 0.0 for v in thinned([v for _, v in s.points], most)] for s in series]
    totals = [sum(part) for part in zip(*parts, strict=True)]
    with new_figure(size, label) as figure:
        axes = chart_axes(figure, series[0].x, (0.0, max(totals) or 1.0))
        low, high = axes.get_xlim()
        slot, base = (high - low) / len(totals), [0.0] * len(totals)
        for s, part in zip(series, parts, strict=True):
            lefts = [low + i * slot for i in range(len(part))]
            axes.bar(lefts, part, 0.9 * slot, base, align="edge", color=variable(s.color), linewidth=0, clip_on=False)
            base = [below + value for below, value in zip(base, part, strict=True)]
        return _with_ruler(figure, axes, label)


def panel_axes(figure: "Figure", margins: Margins) -> "Axes":
    """Add axes that fill the figure except for its margins."""
    (width, height), (left, right, top, bottom) = pixel_size(figure), margins
    return figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    )


def round_ticks(axis: "Axis", most: int, *, integer: bool = False) -> None:
    """Place ticks at round numbers, with at most `most` intervals."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=integer, steps=STEPS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: significant(round(value, 12))))


def chart_axes(
    figure: "Figure",
    x: Sequence[float],
    limits: tuple[float, float],
    *,
    margins: Margins = (46, 10, 8, 22),
    intervals: int = 3,
) -> "Axes":
    """Add axes with round numbers at both ends of y, with at most `intervals` intervals, and x from the first to the
    last step."""
    from matplotlib.ticker import MaxNLocator

    axes = panel_axes(figure, margins)
    levels = MaxNLocator(intervals, steps=STEPS).tick_values(*limits)
    texts = ([significant(round(level, 12), digits) for level in levels] for digits in range(3, 13))
    axes.set_yticks(levels, next((labels for labels in texts if len(set(labels)) == len(levels)), None))
    axes.set_ylim(levels[0], levels[-1])
    low, high = min(x), max(x)
    axes.set_xlim(low, high if high > low else low + 1)
    ticks = MaxNLocator(5, integer=True, steps=STEPS).tick_values(low, high) if high > low else [low]
    places = [t for t in ticks if low <= t <= high]
    axes.set_xticks(places, [f"{t:,.0f}" for t in places])
    return axes


def draw_series(axes: "Axes", s: Series, number: int, color: Color = variable) -> None:
    """Draw a series with its whiskers, its band, its running mean or its dots."""
    style: dict[str, Any] = {"color": color(s.color), "linewidth": 1.8, "clip_on": False}
    marks: dict[str, Any] = {"color": color(s.color), "linestyle": "", "markeredgewidth": 0, "clip_on": False}
    if s.spread:
        if whiskers := [(x, *pair) for x, y, pair in zip(s.x, s.y, s.spread, strict=True) if math.isfinite(y)]:
            whisker = style | {"linewidth": 1.6, "alpha": 0.75}
            axes.vlines(*zip(*whiskers, strict=True), gid=f"whisker-{number}", **whisker)
        axes.plot(s.x, s.y, marker="o", markersize=7, gid=f"dot-{number}", **marks)
        return
    values = s.y
    if s.smooth and len(values) >= 12:
        axes.plot(s.x, values, gid=f"raw-{number}", **{**style, "linewidth": 1.0, "alpha": 0.35})
        values = [math.nan if v is None else v for v in running_mean([v for _, v in s.points])]
    if s.band:
        low, high = zip(*s.band, strict=True)
        area: Any = {"facecolor": color(s.color), "alpha": 0.16, "linewidth": 0}
        axes.fill_between(s.x, low, high, gid=f"band-{number}", **area)
    axes.plot(s.x, values, gid=f"line-{number}", linestyle=line_style(s.dash), **style)
    gaps = [False, *(math.isfinite(v) for v in values), False]  # a point without neighbours is drawn as a dot
    alone = [i for i in range(len(values)) if gaps[i + 1] and (s.dots or not (gaps[i] or gaps[i + 2]))]
    if alone:
        places, heights = [s.x[i] for i in alone], [values[i] for i in alone]
        axes.plot(places, heights, marker="o", markersize=5, gid=f"dot-{number}", **marks)


def _prepared(series: Series, ends: tuple[float, float]) -> Series:
    """Reduce a series to at most `POINTS` points, none of them infinite, NaN or beyond the ends of the axis."""
    low, high = ends

    def inside(value: float) -> float:
        return min(max(value, low), high)

    finite: list[Point] = [(x, inside(v) if v is not None and math.isfinite(v) else None) for x, v in series.points]
    series = replace(series, spread=[(inside(a), inside(b)) for a, b in series.spread])
    if series.spread or len(finite) <= POINTS:
        return replace(series, points=finite)
    places = [len(finite) * (2 * i + 1) // (2 * POINTS) for i in range(POINTS)]
    values = thinned([v for _, v in finite], POINTS)
    points = [(finite[place][0], value) for place, value in zip(places, values, strict=True)]
    return replace(series, points=points, band=[series.band[place] for place in places] if series.band else ())


def _limits(series: Sequence[Series], zero: bool, within: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return the lowest and highest values that the axis must show; None without any value."""
    values = [v for s in series for _, v in s.points if v is not None]
    values += [v for s in series for pair in s.spread for v in pair]
    if not values:
        return None
    values += within or [v for s in series for pair in s.band for v in pair]
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0) if low < 0 else high or 1.0
    margin = (abs(low) or 1.0) / 2 if low == high else 0.0
    return low - margin, high + margin


def _with_ruler(figure: "Figure", axes: "Axes", label: str) -> Markup:
    """Return the chart with the positions of its axes, and with the ruler that the page's script moves."""
    box, (low, high), (start, end) = axes.bbox, axes.get_ylim(), axes.get_xlim()
    height = pixel_size(figure)[1]
    places = {"left": box.x0, "right": box.x1, "top": height - box.y1, "bottom": height - box.y0}
    places |= {"from": start, "to": end, "low": low, "high": high}
    data = "".join(f' data-{name}="{round(float(value), 9):.12g}"' for name, value in places.items())
    ends = f'y1="{places["top"]:g}" y2="{places["bottom"]:g}"'
    ruler = f'<line class="ruler" {ends} stroke="var(--muted)" visibility="hidden"/>'
    return page_svg(figure, label, data, ruler)
