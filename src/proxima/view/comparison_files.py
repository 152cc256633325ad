"""A comparison as a file: the page, its curves as a figure, or its table, by the suffix."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from proxima.data import UserError
from proxima.experiments.cell_statistics import HELD_OUT, CellSummary, SeedMean
from proxima.experiments.run_comparison import RunComparison
from proxima.system.atomic_files import write_atomic
from proxima.view import comparison_page
from proxima.view.chart import FIGURES, Color, Drawing, panel_axes, round_ticks, write_figure
from proxima.view.palette import CELLS
from proxima.view.table_formats import Format, table_as

if TYPE_CHECKING:
    from matplotlib.figure import Figure


TABLES: dict[str, Format] = {".csv": "csv", ".json": "json", ".md": "md"}
PANEL, HEIGHT = 460.0, 300.0  # CSS pixels of a chart
LEGEND = 18.0  # of a line of the legend
FIGURE_CURVES = (HELD_OUT, "reward/mean", "loss")  # the first two that a run has


def comparison_file(out: Path) -> Path:
    """The file for a comparison. Raises: UserError for a suffix that is none of a page, a figure or a table."""
    if (suffix := out.suffix.lower()) not in (known := (".html", *FIGURES, *TABLES)):
        has = f"the suffix {suffix}" if suffix else "no suffix"
        raise UserError(f"--out {out} has {has}", remedy=f"write one of {', '.join(known)}")
    return out


def write_comparison_file(
    comparison: RunComparison, out: Path, *, title: str, over: str | None = None, more: Mapping[str, Any]
) -> None:
    """Write the comparison in the format of the file's suffix; `more` are further facts for JSON.

    Raises:
        UserError: see `comparison_file`, `write_comparison`; matplotlib is missing; `over` is for the page.
    """
    suffix = comparison_file(out).suffix.lower()
    if suffix != ".html" and over is not None:
        raise UserError(f"--over {over}: is a chart of the page", remedy="write an .html file")
    if suffix in FIGURES:
        write_figure(ComparisonFigure(comparison, title), out)
    elif suffix in TABLES:
        write_atomic(out, table_text_as(TABLES[suffix], comparison, more))
    else:
        comparison_page.write_comparison(comparison, out, title=title, over=over)


def table_text_as(form: Format, comparison: RunComparison, more: Mapping[str, Any]) -> str:
    """Return the final table in a format."""
    rows = comparison.rows()
    texts = [comparison_page.table_columns(row, comparison) for row in rows]
    return table_as(form, texts, [_numbers(row) for row in rows], {**comparison.as_json(), **more})


def _numbers(row: CellSummary) -> dict[str, Any]:
    """The unrounded numbers of a cell: of each mean also half of its interval, and n."""
    numbers: dict[str, Any] = {"cell": row.cell, "seeds": row.n, "runs": row.runs}
    fields = ("before", "after", "best", "reward", "generate", "train", "clock", "cpu", "generate_rate", "train_rate")
    means: dict[str, SeedMean | None] = {name: getattr(row, name) for name in fields} | {**row.figures}
    means |= {f"difference/{name}": mean for name, mean in row.difference.items()}
    for name, mean in means.items():
        if mean is not None:
            numbers |= {name: mean.mean, f"{name}/half": "" if mean.half is None else mean.half}
    return numbers | {f"to_target/{axis}": cost.median for axis, cost in row.reach.items() if cost.median is not None}


@dataclass(frozen=True)
class ComparisonFigure(Drawing):
    """The held-out figure and the training reward of each cell over the steps: means over seeds, with 95 % areas."""

    comparison: RunComparison
    name: str

    salt: ClassVar[str] = "comparison"

    @property
    def curves(self) -> list[str]:
        cells = self.comparison.cells
        found = [key for key in FIGURE_CURVES if any(cell.band(key) for cell in cells)]
        return found[:2]

    @property
    def title(self) -> str:
        return self.name

    @property
    def size(self) -> tuple[float, float]:
        return PANEL * max(1, len(self.curves)), HEIGHT + LEGEND * len(self.comparison.cells)

    def draw(self, figure: "Figure", color: Color) -> None:
        (width, height), lines = self.size, LEGEND * len(self.comparison.cells)
        for column, key in enumerate(self.curves):
            margins = (PANEL * column + 52, width - PANEL * (column + 1) + 14, 34, 44 + lines)
            axes = panel_axes(figure, margins)
            for i, cell in enumerate(self.comparison.cells):
                band, look = cell.band(key), color(CELLS[i % len(CELLS)])
                if band is None:
                    continue
                dashes = ("-", "--", ":")[min(i // len(CELLS), 2)]
                axes.plot(band.x, band.mean, dashes, color=look, linewidth=1.6, marker="o" if len(band.x) < 2 else "")
                if band.low and len(band.x) > 1:
                    axes.fill_between(band.x, band.low, band.high, color=look, alpha=0.15, linewidth=0)
            axes.set_title(f"held-out {self.comparison.headline.title}" if key == HELD_OUT else key)
            axes.set_xlabel("step")
            round_ticks(axes.xaxis, 6, integer=True)
            round_ticks(axes.yaxis, 5)
        for i, cell in enumerate(self.comparison.cells):
            y = 1 - (height - lines + LEGEND * (i + 0.4)) / height
            text = f"━  {cell.name}  n={len(cell.used)}"
            figure.text(52 / width, y, text, color=color(CELLS[i % len(CELLS)]))
