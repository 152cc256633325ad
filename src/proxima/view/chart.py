"""The figures of `proxima plot` and `proxima compare`, drawn by matplotlib and written as an .svg, a .png or a .pdf.

An .svg has plain colours, which every program reads, those of `PALETTE` on a light page; in a browser, rules replace
them where the reader's scheme is dark. matplotlib, of the extra `plot`, is imported when a figure is drawn.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from markupsafe import escape

from proxima.data import UserError
from proxima.system.atomic_files import write_atomic
from proxima.view.formatting import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.axis import Axis as Axis
    from matplotlib.figure import Figure as Figure
else:
    Axes = Axis = Figure = Any


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
CELLS = [name for name in PALETTE if name.startswith("k")]


def cell_colors() -> str:
    """Return the CSS of a page: the colours of cells, and a class for each, whose `--cell` is its colour."""
    pairs = "".join(f" --{name}: light-dark({', '.join(PALETTE[name])});" for name in CELLS)
    return f":root {{{pairs} }}\n" + "".join(f".{name} {{ --cell: var(--{name}) }}\n" for name in CELLS)


FONT = 'system-ui, -apple-system, "Segoe UI", sans-serif'
FIGURES = (".svg", ".png", ".pdf")
STEPS = [1, 2, 5, 10]  # ticks are at multiples of these
STYLE: dict[str, Any] = {f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")}
STYLE |= {"svg.fonttype": "none", "font.family": "DejaVu Sans", "lines.scale_dashes": False, "figure.dpi": 72.0}
STYLE |= {"xtick.bottom": False, "ytick.left": False, "axes.facecolor": "none", "figure.facecolor": "none"}
STYLE |= {"axes.grid": True, "axes.grid.axis": "y", "grid.linewidth": 1.0, "axes.axisbelow": True}
STYLE |= {"axes.unicode_minus": False, "text.parse_math": False}
STYLE |= {"pdf.fonttype": 42}  # whole fonts: text stays text
STYLE |= {"axes.titlelocation": "left", "axes.titleweight": "bold"}

Margins = tuple[float, float, float, float]  # left, right, top and bottom, in pixels
Color = Callable[[str], str]  # a name of `PALETTE` → a colour of matplotlib


class Drawing(Protocol):
    """A figure in a separate file. Subclasses define its title and its size in CSS pixels, and draw it."""

    salt: ClassVar[str] = "figure"  # makes the ids of clip paths unique among the figures of a page
    font: ClassVar[int] = 12
    simplify: ClassVar[bool] = False  # drop points on straight lines

    @property
    def title(self) -> str: ...

    @property
    def size(self) -> tuple[float, float]: ...

    def draw(self, figure: Figure, color: Color) -> None: ...

    @contextmanager
    def opened(self, color: Color) -> Iterator[Figure]:
        """Yield the drawn figure, whose units are CSS pixels; it must be saved within this context."""
        try:
            import matplotlib
            from matplotlib.figure import Figure as NewFigure
        except ImportError:
            raise UserError("a figure needs the package matplotlib", remedy="pip install 'proxima-rl[plot]'") from None

        colors = {"text.color": "ink", "grid.color": "grid", "axes.labelcolor": "muted", "axes.titlecolor": "ink"}
        colors |= {"xtick.labelcolor": "muted", "ytick.labelcolor": "muted"}
        settings: Any = {"svg.hashsalt": self.salt, "path.simplify": self.simplify, "font.size": self.font}
        settings |= {"axes.titlesize": self.font} | STYLE | {key: color(name) for key, name in colors.items()}
        with matplotlib.rc_context(settings):
            figure = NewFigure(figsize=(self.size[0] / 72, self.size[1] / 72))
            self.draw(figure, color)
            yield figure


def light(name: str) -> str:
    """Return a colour of `PALETTE` on a light page."""
    return PALETTE[name][0]


def dark_rules() -> str:
    """Return the CSS that replaces the colours of a light page by those of a dark one."""
    pairs = [(light, dark) for light, dark in PALETTE.values() if light != dark]
    rules = []
    for light, dark in pairs:
        for name in ("fill", "stroke"):
            rules.append(f'[style*="{name}: {light}"]{{{name}:{dark}!important}}')
    return f"@media (prefers-color-scheme: dark) {{{''.join(rules)}}}"


def svg_file(drawing: Drawing) -> str:
    """Return the figure as the text of an .svg file, with its title and its colours for light and dark, without fonts
    or ids that nothing refers to."""
    width, height = drawing.size
    style = f"{dark_rules()}\nsvg {{ font-family: {FONT}; }} path {{ stroke-linejoin: round; }}"
    stream = io.StringIO()
    with drawing.opened(light) as figure:
        figure.patch.set_facecolor(light("paper"))
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = stream.getvalue().partition("</defs>")[2]
    path = re.compile(r'(?<= d=")[^"]*')  # its data with two decimals, on one line
    text = path.sub(lambda m: " ".join(re.sub(r"(\.\d\d)\d+", r"\1", m[0]).split()), text)
    text = re.sub(r' id="[\w.]+_\d+"| transform="rotate\(-0 [^"]*"|(?<="| )font-family: [^;"]*;? ?', "", text)
    text = re.sub(r">\s+<", "><", text.replace("xlink:href", "href")).strip().removesuffix("</svg>")
    opening = f'<svg role="img" viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg"'
    head = f"<title>{escape(drawing.title)}</title><style>{style}</style>"
    return f'{opening} width="{width:g}" height="{height:g}">{head}{text}</svg>\n'


def figure_file(out: Path | str) -> Path:
    """The file for a figure. Raises: UserError for a suffix that is not one of `FIGURES`."""
    out = Path(out)
    suffix = out.suffix.lower()
    if suffix not in FIGURES:
        written = f"the suffix {suffix}" if suffix else "no suffix"
        raise UserError(f"{out} has {written}", remedy="write an .svg, a .png or a .pdf")
    return out


def write_figure(drawing: Drawing, out: Path | str) -> Path:
    """Write a figure to `out`, see `figure_file`, and return the path."""
    file = figure_file(out)
    kind = file.suffix.lower()
    if kind == ".svg":
        write_atomic(file, svg_file(drawing))
        return file
    stream = io.BytesIO()
    metadata = None
    dpi: float | str = 150
    if kind == ".pdf":
        metadata = {"CreationDate": None}
        dpi = "figure"
    with drawing.opened(light) as figure:
        figure.savefig(stream, format=kind[1:], facecolor=light("paper"), metadata=metadata, dpi=dpi)
    write_atomic(file, stream.getvalue())
    return file


def panel_axes(figure: Figure, margins: Margins) -> Axes:
    """Add axes that fill the figure except for its margins."""
    width, height = map(float, 72 * figure.get_size_inches())
    left, right, top, bottom = margins
    return figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    )


def round_ticks(axis: Axis, most: int, *, integer: bool = False) -> None:
    """Place ticks at round numbers, with at most `most` intervals."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=integer, steps=STEPS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: significant(round(value, 12))))
