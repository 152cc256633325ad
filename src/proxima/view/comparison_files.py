"""A comparison of runs, printed and as a file: the page, its curves as a figure, or its table, by the suffix."""

import difflib
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from proxima.data import UserError
from proxima.evaluation.headline import Headline
from proxima.experiments.cell_statistics import HELD_OUT, CellSummary, SeedMean, final_value
from proxima.experiments.metric_names import canonical_metric
from proxima.experiments.run_comparison import RunComparison, compare_runs
from proxima.experiments.run_reader import NoMetrics, Run, find_runs, read_run
from proxima.system.atomic_files import write_atomic
from proxima.view import comparison_page
from proxima.view.chart import CELLS, FIGURES, Color, Drawing, Figure, panel_axes, round_ticks, write_figure
from proxima.view.formatting import output_width, printable, significant
from proxima.view.terminal import Format, stacked, table_as, table_text

TABLES: dict[str, Format] = {".csv": "csv", ".json": "json", ".md": "md"}
PANEL = 460.0  # CSS pixels of a chart
HEIGHT = 300.0
WIDTH = 100  # columns of the terminal
LEGEND = 18.0  # of a line of the legend
FIGURE_CURVES = (HELD_OUT, "reward/mean", "loss")  # the first two that a run has


def comparison_file(out: Path) -> Path:
    """The file for a comparison. Raises: UserError for a suffix that is none of a page, a figure or a table."""
    suffix = out.suffix.lower()
    suffixes = (".html", *FIGURES, *TABLES)
    if suffix not in suffixes:
        has = f"the suffix {suffix}" if suffix else "no suffix"
        raise UserError(f"--out {out} has {has}", remedy=f"write one of {', '.join(suffixes)}")
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
    means: dict[str, SeedMean | None] = {name: getattr(row, name) for name in fields}
    means |= row.figures
    means |= {f"difference/{name}": mean for name, mean in row.difference.items()}
    for name, mean in means.items():
        if mean is not None:
            numbers[name] = mean.mean
            numbers[f"{name}/half"] = "" if mean.half is None else mean.half
    for axis, cost in row.reach.items():
        if cost.median is not None:
            numbers[f"to_target/{axis}"] = cost.median
    return numbers


@dataclass(frozen=True)
class ComparisonFigure(Drawing):
    """The held-out figure and the training reward of each cell over the steps: means over seeds, with 95 % areas."""

    comparison: RunComparison
    name: str

    salt: ClassVar[str] = "comparison"

    @property
    def curves(self) -> list[str]:
        cells = self.comparison.cells
        return [key for key in FIGURE_CURVES if any(cell.band(key) for cell in cells)][:2]

    @property
    def title(self) -> str:
        return self.name

    @property
    def size(self) -> tuple[float, float]:
        return PANEL * max(1, len(self.curves)), HEIGHT + LEGEND * len(self.comparison.cells)

    def draw(self, figure: Figure, color: Color) -> None:
        width, height = self.size
        lines = LEGEND * len(self.comparison.cells)
        for column, key in enumerate(self.curves):
            margins = (PANEL * column + 52, width - PANEL * (column + 1) + 14, 34, 44 + lines)
            axes = panel_axes(figure, margins)
            for i, cell in enumerate(self.comparison.cells):
                band = cell.band(key)
                line = color(CELLS[i % len(CELLS)])
                if band is None:
                    continue
                dashes = ("-", "--", ":")[min(i // len(CELLS), 2)]
                marker = "o" if len(band.x) < 2 else ""
                axes.plot(band.x, band.mean, dashes, color=line, linewidth=1.6, marker=marker)
                if band.low and len(band.x) > 1:
                    axes.fill_between(band.x, band.low, band.high, color=line, alpha=0.15, linewidth=0)
            title = f"held-out {self.comparison.headline.title}" if key == HELD_OUT else key
            axes.set_title(title)
            axes.set_xlabel("step")
            round_ticks(axes.xaxis, 6, integer=True)
            round_ticks(axes.yaxis, 5)
        for i, cell in enumerate(self.comparison.cells):
            y = 1 - (height - lines + LEGEND * (i + 0.4)) / height
            text = f"━  {cell.name}  n={len(cell.used)}"
            figure.text(52 / width, y, text, color=color(CELLS[i % len(CELLS)]))


def compare_and_print(
    places: Sequence[str],
    *,
    out: Path | None = None,
    target: float | None = None,
    baseline: str | None = None,
    over: str | None = None,
    metrics: Sequence[str] = (),
    form: Format = "text",
) -> None:
    """Compare runs: write the page, and print the final table; in another format than text, the page only to `out`.

    Args:
        places: as for `find_runs`.
        out: a file, see `comparison_file`; None: compare.html in the sweep's folder, or in the current one.
        target, baseline: as for `compare_runs`.
        over: see `write_comparison_file`.
        metrics: their means over the last tenth of the steps are printed too; the first one that evaluations have is
            what is compared.
    """
    if out is not None:
        comparison_file(out)
    folders = find_runs(places)
    runs, unread = _read(folders)
    keys = {name: _recorded(name, runs) for name in metrics}
    evaluations = list(chain.from_iterable(run.evals for run in runs))
    headline = None
    for key in keys.values():
        if headline is None and any(record.get(key) is not None for record in evaluations):
            headline = key
    comparison = compare_runs(runs, baseline=baseline, target=target, metric=headline)
    page = out
    if page is None and form == "text":
        place = Path(places[0])
        is_sweep = len(places) == 1 and place.is_dir() and place not in folders
        page = place / "compare.html" if is_sweep else Path("compare.html")
    replaced = out is None and page is not None and page.exists()
    if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
        raise UserError(f"--out {page}: must be a file in a folder that exists")
    means: dict[str, dict[str, SeedMean]] = {}
    for name, key in keys.items():
        ends = {cell.name: cell.over_seeds(final_value(key)) for cell in comparison.cells}
        recorded = {cell: mean for cell, mean in ends.items() if mean is not None}
        if recorded:
            means[name] = recorded
    more: dict[str, Any] = {}
    if means:
        more["metrics"] = {name: {cell: vars(mean) for cell, mean in cells.items()} for name, cells in means.items()}
    more |= {"unread": unread, "page": None if page is None else str(page)}
    if page is not None:
        title = Path(places[0]).resolve().name if len(places) == 1 else "Comparison"
        write_comparison_file(comparison, page, title=title, over=over, more=more)
    if form != "text":
        print(table_text_as(form, comparison, more), end="")
        return
    _show(comparison, unread)
    for name, cells in means.items():
        _show_metric(keys[name], cells)
    note = " (replaced)" if replaced else ""
    print(f"\n{page}{note}")


def _read(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Read the runs; if there are several, also return why some can't be compared yet."""
    runs: list[Run] = []
    unread: list[str] = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except NoMetrics as error:
            if len(folders) == 1:
                raise
            unread.append(str(error))
    if not runs:
        raise UserError(f"none of the {len(folders)} runs has recorded metrics; wait for a finished step")
    return runs, unread


def _recorded(name: str, runs: Sequence[Run]) -> str:
    """The key of a metric that a step or an evaluation has recorded; UserError with the nearest ones if none has."""
    records = []
    for run in runs:
        records += [*run.train, *run.evals]
    headline = Headline.of(records, canonical_metric(name))
    if all(headline.value(record) is None for record in records):
        recorded = set(chain.from_iterable(records))
        recorded |= {Headline(key).name for key in recorded}
        near = ", ".join(difflib.get_close_matches(name, sorted(recorded), n=3, cutoff=0.0)) or "none"
        remedy = f"the nearest: {near}; all are keys of {runs[0].folder / 'metrics.jsonl'}"
        raise UserError(f"--metric {name}: no run has recorded it", remedy=remedy)
    return headline.key


def _show_metric(name: str, means: dict[str, SeedMean]) -> None:
    print(f"\n{name}, mean over the last tenth of the steps")
    width = max(map(len, means))
    for cell, mean in means.items():
        half = "" if mean.half is None else f" ± {significant(mean.half)}"
        print(f"  {printable(cell):<{width}}  {significant(mean.mean)}{half}")


def _show(comparison: RunComparison, unread: list[str]) -> None:
    for text in (*comparison.warnings, *unread):
        print(f"WARNING {printable(text)}", file=sys.stderr)
    rows = [
        {name: printable(text) for name, text in comparison_page.table_columns(row, comparison).items()}
        for row in comparison.rows()
    ]
    width = min(WIDTH, output_width(sys.stdout) or WIDTH)
    tables = (table_text(block, sys.stdout, width=width) for block in stacked(rows, width))
    print("\n\n".join(tables))
    for note in comparison.notes:
        print(textwrap.fill(f"note: {printable(note)}", width, subsequent_indent="      ", break_on_hyphens=False))
