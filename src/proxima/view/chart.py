"""The figures of `proxima plot`, drawn by matplotlib and written as an .svg or a .png. The colours of an .svg are CSS
variables, so that it follows the reader's light or dark scheme.

matplotlib writes plain hex colours; each name of `PALETTE` has a placeholder colour that becomes `var(--name)` in the
text. matplotlib, of the extra `plot`, is imported when a figure is drawn.
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
from proxima.view.palette import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FONT = 'system-ui, -apple-system, "Segoe UI", sans-serif'
STEPS = [1, 2, 5, 10]  # ticks are at multiples of these
LOOK: dict[str, Any] = {f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")}
LOOK |= {"svg.fonttype": "none", "font.family": "DejaVu Sans", "lines.scale_dashes": False, "figure.dpi": 72.0}
LOOK |= {"xtick.bottom": False, "ytick.left": False, "axes.facecolor": "none", "figure.facecolor": "none"}
LOOK |= {"axes.grid": True, "axes.grid.axis": "y", "grid.linewidth": 1.0, "axes.axisbelow": True}
LOOK |= {"axes.unicode_minus": False, "text.parse_math": False}
LOOK |= {"axes.titlelocation": "left", "axes.titleweight": "bold"}

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

    def draw(self, figure: "Figure", color: Color) -> None: ...

    @contextmanager
    def opened(self, color: Color) -> "Iterator[Figure]":
        """Yield the drawn figure, whose units are CSS pixels; it must be saved within this context."""
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError:
            raise UserError("a figure needs the package matplotlib", remedy="pip install 'proxima-rl[plot]'") from None

        colors = {"text.color": "ink", "grid.color": "grid", "axes.labelcolor": "muted", "axes.titlecolor": "ink"}
        colors |= {"xtick.labelcolor": "muted", "ytick.labelcolor": "muted"}
        settings: Any = {"svg.hashsalt": self.salt, "path.simplify": self.simplify, "font.size": self.font}
        settings |= {"axes.titlesize": self.font} | LOOK | {key: color(name) for key, name in colors.items()}
        with matplotlib.rc_context(settings):
            figure = Figure(figsize=(self.size[0] / 72, self.size[1] / 72))
            self.draw(figure, color)
            yield figure


def variable(name: str) -> str:
    """Return the placeholder colour that is replaced by `var(--name)` in the SVG text."""
    return f"#fe00{list(PALETTE).index(name):02x}"


def svg_file(drawing: Drawing) -> str:
    """Return the figure as the text of an .svg file, with its title and its colours for light and dark, without fonts
    or ids that nothing refers to."""
    width, height = drawing.size
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in PALETTE.items()) for i in (0, 1))
    colors = f"svg {{ {light} }}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n"
    style = f"{colors}svg {{ font-family: {FONT}; }} path {{ stroke-linejoin: round; }}"
    stream = io.StringIO()
    with drawing.opened(variable) as figure:
        figure.patch.set_facecolor(variable("paper"))
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = stream.getvalue().partition("</defs>")[2]
    path = re.compile(r'(?<= d=")[^"]*')  # its data with two decimals, on one line
    text = path.sub(lambda m: " ".join(re.sub(r"(\.\d\d)\d+", r"\1", m[0]).split()), text)
    text = re.sub(r' id="[\w.]+_\d+"| transform="rotate\(-0 [^"]*"|(?<="| )font-family: [^;"]*;? ?', "", text)
    text = re.sub(r"#fe00([0-9a-f]{2})", lambda m: f"var(--{list(PALETTE)[int(m[1], 16)]})", text)
    text = re.sub(r">\s+<", "><", text.replace("xlink:href", "href")).strip().removesuffix("</svg>")
    opening = f'<svg role="img" viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg"'
    head = f"<title>{escape(drawing.title)}</title><style>{style}</style>"
    return f'{opening} width="{width:g}" height="{height:g}">{head}{text}</svg>\n'


def figure_file(out: Path | str) -> Path:
    """The file for a figure. Raises: UserError for a suffix that is neither .svg nor .png."""
    out = Path(out)
    if (suffix := out.suffix.lower()) not in (".svg", ".png"):
        raise UserError(f"{out} has {f'the suffix {suffix}' if suffix else 'no suffix'}; write an .svg or a .png")
    return out


def write_figure(drawing: Drawing, out: Path | str) -> Path:
    """Write a figure to `out`, see `figure_file`, and return the path."""
    if (file := figure_file(out)).suffix.lower() == ".svg":
        write_atomic(file, svg_file(drawing))
    else:
        stream = io.BytesIO()
        with drawing.opened(lambda name: PALETTE[name][0]) as figure:
            figure.savefig(stream, format="png", dpi=150, facecolor=PALETTE["paper"][0])
        write_atomic(file, stream.getvalue())
    return file


def panel_axes(figure: "Figure", margins: Margins) -> "Axes":
    """Add axes that fill the figure except for its margins."""
    (width, height), (left, right, top, bottom) = map(float, 72 * figure.get_size_inches()), margins
    return figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    )


def round_ticks(axis: "Axis", most: int, *, integer: bool = False) -> None:
    """Place ticks at round numbers, with at most `most` intervals."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=integer, steps=STEPS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: significant(round(value, 12))))
