"""The figures of `proxima plot`, drawn by matplotlib and written as an .svg or a .png. The colours of an .svg are CSS
variables, so that it follows the reader's light or dark scheme.

matplotlib writes plain hex colours; each name of `PALETTE` has a placeholder colour that becomes `var(--name)` in the
text. matplotlib, of the extra `plot`, is imported when a figure is drawn.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from markupsafe import escape

from proxima.data import UserError
from proxima.system.atomic_files import write_atomic
from proxima.view.formatting import significant
from proxima.view.palette import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FONT = 'system-ui, -apple-system, "Segoe UI", sans-serif'
STEPS = [1, 2, 5, 10]  # ticks are at multiples of these

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


def variable(name: str) -> str:
    """Return the placeholder colour that is replaced by `var(--name)` in the SVG text."""
    return f"#fe00{list(PALETTE).index(name):02x}"


def line_style(dash: Sequence[float]) -> Any:
    """Return matplotlib's style for a line with these dashes and gaps, in pixels; solid if empty."""
    return (0, tuple(dash)) if dash else "-"


@contextmanager
def new_figure(
    size: tuple[float, float], salt: str, *, color: Color = variable, font: int = 11, simplify: bool = False
) -> "Iterator[Figure]":
    """Create a matplotlib figure whose units are CSS pixels.

    Args:
        salt: makes the ids of clip paths unique among the figures of a page.
        simplify: drop points on straight lines.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("a figure needs the package matplotlib", remedy="pip install 'proxima-rl[plot]'") from None

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


def _svg_text(figure: "Figure", attributes: str) -> str:
    """Return the figure as an `<svg>` element: colours as variables, no fonts, no ids but those it refers to."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = stream.getvalue().partition("</defs>")[2]
    path = re.compile(r'(?<= d=")[^"]*')  # its data with two decimals, on one line
    text = path.sub(lambda m: " ".join(re.sub(r"(\.\d\d)\d+", r"\1", m[0]).split()), text)
    text = re.sub(r' id="[\w.]+_\d+"| transform="rotate\(-0 [^"]*"|(?<="| )font-family: [^;"]*;? ?', "", text)
    text = re.sub(r"#fe00([0-9a-f]{2})", lambda m: f"var(--{list(PALETTE)[int(m[1], 16)]})", text)
    text = re.sub(r">\s+<", "><", text.replace("xlink:href", "href")).strip().removesuffix("</svg>")
    width, height = pixel_size(figure)
    return f'<svg role="img" viewBox="0 0 {width:g} {height:g}" {attributes}>{text}</svg>'


def svg_file(drawing: Drawing) -> str:
    """Return the figure as the text of an .svg file, which includes its title and its colours for light and dark."""
    width, height = drawing.size
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in PALETTE.items()) for i in (0, 1))
    colors = f"svg {{ {light} }}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n"
    style = f"{colors}svg {{ font-family: {FONT}; }} path {{ stroke-linejoin: round; }}"
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
