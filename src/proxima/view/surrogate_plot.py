"""Surrogates side by side in one figure: loss and gradient weight over the ratio and the probability, for both signs of
the advantage.

An SVG is drawn here and carries its colours for light and dark; a PNG is drawn by matplotlib (extra `plot`) from the
same panels.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

from torch import Tensor

from proxima.core.loss import Surrogate
from proxima.data import UserError
from proxima.data.atomic_files import write_whole
from proxima.view.chart import Frame, ticks
from proxima.view.formatting import significant
from proxima.view.surrogate_curve import Over, SurrogateCurve, TokenSetting, curve, remark_on

Quantity = Literal["loss", "weight"]
MOST = 8  # curves that can still be told apart
LIGHT = ("#2563eb", "#c2500c", "#15803d", "#a21caf", "#0e7490", "#b91c1c", "#6d28d9", "#57534e")
DARK = ("#7aaefc", "#f2a164", "#6ee7a0", "#f0a3fb", "#67d8ef", "#fca5a5", "#c4b5fd", "#d6d3d1")
WIDTHS = (3.4, 2.2, 2.2, 2.2, 2.2, 2.2, 2.2, 2.2)  # the first is wide: where curves coincide it shows on both sides
DASHES = ("", "", "7 4", "2 3", "9 3 2 3", "4 2", "1 2", "12 3")
WINDOW: dict[Quantity, tuple[float, float]] = {
    "loss": (-4.0, 4.0),
    "weight": (-1.5, 3.5),
}  # in units of the advantage; beyond is cut off
# of the panel's height between neighbouring points, and four times their neighbours' step: no slope; the line is
# interrupted
JUMP = 0.06
NAMES: dict[str, str] = {"ratio": "ratio π / μ", "probability": "probability π"}
PANEL = {"width": 290, "height": 200, "left": 40, "right": 12, "top": 26, "bottom": 38}
HEAD, LINE = 44, 18
STYLE = """
svg { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; background: var(--paper); --paper: #ffffff; --ink: #1f2328; --muted: #59636e; --grid: #e3e6ea; %s }
@media (prefers-color-scheme: dark) { svg { --paper: #0d1117; --ink: #e6edf3; --muted: #9198a1; --grid: #2c323a; %s } }
text { fill: var(--muted); } .title { fill: var(--ink); font-weight: 600; } .name { fill: var(--ink); font-size: 13px; }
.grid { stroke: var(--grid); } .zero { stroke: var(--muted); } .mark { stroke: var(--muted); stroke-dasharray: 2 4; }
.line { fill: none; stroke-linejoin: round; }
"""  # noqa: E501


@dataclass(frozen=True)
class SurrogateLine:
    """One curve of a panel: its number among the surrogates, and its pieces, each without a jump."""

    number: int
    pieces: tuple[tuple[tuple[float, float], ...], ...]


@dataclass(frozen=True)
class SurrogatePanel:
    """`title`, the name of the x axis, the ranges shown, where r = 1 is, and the curves."""

    title: str
    x_name: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    mark: float
    lines: tuple[SurrogateLine, ...]


@dataclass(frozen=True)
class SurrogateFigure:
    """Rows of panels, the surrogates' names in their order, and remarks for below the figure."""

    names: tuple[str, ...]
    rows: tuple[tuple[SurrogatePanel, ...], ...]
    remarks: tuple[str, ...]


def draw(
    surrogates: Mapping[str, Surrogate],
    setting: TokenSetting,
    *,
    quantities: Sequence[Quantity] = ("loss", "weight"),
    over: Sequence[Over] = ("ratio", "probability"),
) -> SurrogateFigure:
    """All panels of a figure, a row for the ratio and one for each behavior probability.

    Args:
        surrogates: name for the legend → spec.
        quantities: columns, each for A > 0 and A < 0.
        over: rows.
    Raises:
        ValueError: none or more than eight surrogates; or one that can't be drawn, named.
    """
    if not 1 <= len(surrogates) <= MOST:
        raise UserError(
            f"surrogates: {len(surrogates)} given; draw 1 to {MOST} in one figure, more can't be told apart."
        )
    rows: list[tuple[Over, float]] = [("ratio", setting.behavior_probability[0])] if "ratio" in over else []
    rows += [("probability", mu) for mu in setting.behavior_probability] if "probability" in over else []
    made = tuple(tuple(_row(surrogates, setting, quantities, x, mu)) for x, mu in rows)
    remarks: dict[str, list[str]] = {}
    for name, spec in surrogates.items():
        remarks.setdefault(remark_on(spec, setting), []).append(name)
    mus = ", ".join(f"{mu:g}" for mu in setting.behavior_probability)
    about = (
        f"One token, μ = {mus}, A = ±{setting.advantage:g}; the proximal policy is μ. Gradient weight: "
        "−(∂loss/∂log π) / A."
    )
    return SurrogateFigure(
        tuple(surrogates), made, (about, *(f"{', '.join(who)}: {text}." for text, who in remarks.items() if text))
    )


def _row(
    surrogates: Mapping[str, Surrogate], setting: TokenSetting, quantities: Sequence[Quantity], over: Over, mu: float
) -> Iterator[SurrogatePanel]:
    curves = {
        sign: [_named(name, spec, over, mu, sign, setting) for name, spec in surrogates.items()] for sign in (1, -1)
    }
    for quantity in quantities:
        scale = setting.advantage if quantity == "loss" else 1.0
        for sign in (1, -1):
            ys = [getattr(c, quantity) for c in curves[sign]]
            y_range = _y_range(ys, tuple(scale * edge for edge in WINDOW[quantity]))
            lines = (
                SurrogateLine(i, _pieces(c.x, y, y_range))
                for i, (c, y) in enumerate(zip(curves[sign], ys, strict=True))
            )
            x = curves[sign][0].x
            label = "loss" if quantity == "loss" else "gradient weight"
            yield SurrogatePanel(
                f"{label}, A {'>' if sign > 0 else '<'} 0",
                NAMES[over] + (f", μ = {mu:g}" if over == "probability" else ""),
                (0.0, float(x[-1]) if over == "ratio" else 1.0),
                y_range,
                1.0 if over == "ratio" else mu,
                tuple(lines),
            )


def _named(name: str, spec: Surrogate, over: Over, mu: float, sign: int, setting: TokenSetting) -> SurrogateCurve:
    try:
        return curve(spec, over, mu, sign, setting)
    except ValueError as error:
        raise UserError(f"{name} can't be drawn: {error}") from None


def _y_range(ys: Sequence[Tensor], window: tuple[float, ...]) -> tuple[float, float]:
    low, high = (min(float(y.min()) for y in ys), max(float(y.max()) for y in ys))
    low, high = max(min(low, 0.0), window[0]), min(max(high, 0.0), window[1])
    margin = 0.06 * ((high - low) or 1.0)
    return low - margin, high + margin


def _pieces(x: Tensor, y: Tensor, y_range: tuple[float, float]) -> tuple[tuple[tuple[float, float], ...], ...]:
    """The curve cut at its jumps, and thinned where it is straight."""
    height = y_range[1] - y_range[0]
    points = list(zip(x.tolist(), y.tolist(), strict=True))
    pieces: list[list[tuple[float, float]]] = [points[:1]]
    steps = y.diff().abs().tolist()
    for i, step in enumerate(steps):
        beside = max(steps[max(i - 1, 0) : i] + steps[i + 1 : i + 2])
        if step > max(JUMP * height, 4 * beside) and any(
            y_range[0] <= value <= y_range[1] for _, value in points[i : i + 2]
        ):
            pieces.append([])
        pieces[-1].append(points[i + 1])
    return tuple(tuple(_thinned(piece, height / 20000)) for piece in pieces)


def _thinned(piece: list[tuple[float, float]], tolerance: float) -> Iterator[tuple[float, float]]:
    """Without the points that a straight line between their neighbours passes anyway."""
    kept = piece[:1]
    for before, point in itertools.pairwise(piece[1:]):
        (x0, y0), (x1, y1), (x2, y2) = kept[-1], before, point
        if abs(y0 + (y2 - y0) * (x1 - x0) / (x2 - x0) - y1) > tolerance:
            kept.append(before)
    yield from kept
    if len(piece) > 1:
        yield piece[-1]


def svg(drawing: SurrogateFigure) -> str:
    """The figure as the text of an SVG file."""
    columns = max(len(row) for row in drawing.rows)
    width = columns * PANEL["width"]
    legend, head = _legend(drawing.names, width)
    height = head + len(drawing.rows) * PANEL["height"] + LINE * len(drawing.remarks) + 8
    parts = [f'<rect width="{width}" height="{height}" fill="var(--paper)"/>', legend]
    for i, row in enumerate(drawing.rows):
        for j, panel in enumerate(row):
            place = f"translate({j * PANEL['width']} {head + i * PANEL['height']})"
            parts.append(f'<g transform="{place}">{_panel(panel, f"clip{i}{j}")}</g>')
    foot = head + len(drawing.rows) * PANEL["height"]
    parts += [
        f'<text x="14" y="{foot + LINE * (i + 1) - 6}">{escape(text)}</text>' for i, text in enumerate(drawing.remarks)
    ]
    light, dark = (" ".join(f"--c{i}: {color};" for i, color in enumerate(colors)) for colors in (LIGHT, DARK))
    title = f"<title>{escape(', '.join(drawing.names))}</title><style>{STYLE % (light, dark)}</style>"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{title}{"".join(parts)}</svg>\n'


def _legend(names: Sequence[str], width: int) -> tuple[str, int]:
    """The names with a sample of their lines, in as many rows as they need; and the height of it all."""
    parts, x, y = [], 14.0, 22
    for i, name in enumerate(names):
        needs = 40 + 7.4 * len(name) + 18
        if x > 14 and x + needs > width:
            x, y = 14.0, y + 20
        parts.append(
            f'<path class="line" {_stroke(i)} d="M{x:.0f} {y - 4}h30"/><text class="name" x="{x + 38:.0f}" '
            f'y="{y}">{escape(name)}</text>'
        )
        x += needs
    return "".join(parts), y + 12


def _stroke(number: int) -> str:
    dash = f' stroke-dasharray="{DASHES[number]}"' if DASHES[number] else ""
    faint = ' stroke-opacity=".55"' if number == 0 and WIDTHS[0] > 3 else ""
    return f'stroke="var(--c{number})" stroke-width="{WIDTHS[number]}"{dash}{faint}'


def _panel(panel: SurrogatePanel, name: str) -> str:
    (x_low, x_high), (y_low, y_high) = panel.x_range, panel.y_range
    frame = Frame(**PANEL, x_low=x_low, x_high=x_high, y_low=y_low, y_high=y_high)
    right, foot = frame.width - frame.right, frame.height - frame.bottom
    parts = [f'<text class="title" x="{frame.left}" y="16">{escape(panel.title)}</text>']
    for level in (t for t in ticks(y_low, y_high, 7) if y_low <= t <= y_high):
        y, kind = frame.y(level), "zero" if level == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{frame.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{frame.left - 6}" y="{y + 4:.1f}" text-anchor="end">{significant(level)}</text>')
    for tick in (t for t in ticks(x_low, x_high, 6) if x_low <= t <= x_high):
        parts.append(f'<text x="{frame.x(tick):.1f}" y="{foot + 15}" text-anchor="middle">{significant(tick)}</text>')
    parts.append(
        f'<text x="{(frame.left + right) / 2:.1f}" y="{foot + 31}" text-anchor="middle">{escape(panel.x_name)}</text>'
    )
    mark = frame.x(panel.mark)
    parts.append(f'<line class="mark" x1="{mark:.1f}" x2="{mark:.1f}" y1="{frame.top}" y2="{foot}"/>')
    box = f'x="{frame.left}" y="{frame.top}" width="{right - frame.left}" height="{foot - frame.top}"'
    parts.append(f'<clipPath id="{name}"><rect {box}/></clipPath><g clip-path="url(#{name})">')
    for line in panel.lines:
        path = "".join(
            "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in piece)
            for piece in line.pieces
            if len(piece) > 1
        )
        ends = [piece[-1] for piece in line.pieces[:-1]] + [
            piece[0] for piece in line.pieces[1:]
        ]  # both sides of each jump
        parts.append(f'<path class="line" {_stroke(line.number)} d="{path}"/>')
        parts += [
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.6" fill="var(--c{line.number})"/>'
            for x, y in ends
        ]
    return "".join(parts) + "</g>"


def png(drawing: SurrogateFigure, path: Path) -> None:
    """The figure as a PNG file.

    Raises:
        ValueError: matplotlib isn't installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "a PNG needs matplotlib: pip install 'proxima-rl[plot]', or write an .svg, which needs nothing."
        ) from None
    columns = max(len(row) for row in drawing.rows)
    figure = Figure(figsize=(3.2 * columns, 2.5 * len(drawing.rows) + 0.9), layout="constrained", dpi=150)
    axes = figure.subplots(len(drawing.rows), columns, squeeze=False)
    for row, places in zip(drawing.rows, axes, strict=True):
        for panel, axis in zip(row, places, strict=True):
            axis.axhline(0, color="#59636e", linewidth=0.8)
            axis.axvline(panel.mark, color="#59636e", linewidth=0.8, linestyle=":")
            for line in panel.lines:
                dash = tuple(float(x) for x in DASHES[line.number].split())
                style = {"color": LIGHT[line.number], "linewidth": WIDTHS[line.number] * 0.7}
                for piece in line.pieces:
                    axis.plot(
                        *zip(*piece, strict=True),
                        linestyle=(0, dash) if dash else "-",
                        marker="." if len(piece) == 1 else "",
                        **style,
                    )
            axis.set(xlim=panel.x_range, ylim=panel.y_range, xlabel=panel.x_name)
            axis.set_title(panel.title, fontsize=10)
            axis.grid(color="#e3e6ea")
    handles = [
        axes[0][0].plot(
            [],
            [],
            color=LIGHT[i],
            linewidth=WIDTHS[i] * 0.7,
            linestyle=(0, tuple(float(x) for x in d.split())) if d else "-",
        )[0]
        for i, d in zip(range(len(drawing.names)), DASHES, strict=False)
    ]
    figure.legend(
        handles, drawing.names, loc="outside upper left", ncols=min(len(drawing.names), columns + 1), frameon=False
    )
    figure.supxlabel("\n".join(drawing.remarks), fontsize=8, x=0.01, horizontalalignment="left")
    figure.savefig(path, format="png")


def write_plot(drawing: SurrogateFigure, out: Path | str) -> Path:
    """Write the figure as `out`, an .svg or a .png; return it.

    Raises:
        ValueError: another ending; or a PNG without matplotlib.
    """
    out = Path(out)
    ending = out.suffix.lower()
    if ending == ".svg":
        write_whole(out, svg(drawing))
    elif ending == ".png":
        png(drawing, out)
    else:
        raise UserError(f"{out}: ends in {ending or 'nothing'}; write an .svg or a .png.")
    return out
