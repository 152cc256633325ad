"""Compare runs: one page with curves, intervals over seeds and the final table, which is printed as well."""

import difflib
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from proxima.cli.output import AsJson, TableFormat, chosen_format, terminal_width
from proxima.cli.parameters import Argument
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.experiments.cell_statistics import SeedMean
    from proxima.experiments.run_comparison import RunComparison
    from proxima.experiments.run_reader import Run

WIDTH = 100
OUT = (
    "by its suffix: the page (.html), its curves as a figure (.svg, .png, .pdf), or the table (.csv, .json, .md); "
    "default: compare.html in the sweep's folder, else in the current one"
)
TARGET = "also print the cost of reaching this held-out accuracy or reward"
BASELINE = "the variant that the others are compared with; default: the first"
OVER = "also draw what each variant reached and took over its value of this field of the recipe"
METRIC = (
    "what is compared if evaluations have it (default: accuracy, or else the mean reward); its mean over the last "
    "tenth of the steps is printed too; any of its names, or a reward's name; repeatable"
)


def compare(
    run: Annotated[Sequence[str], Argument("run folders, a sweep's folder, or patterns: 'runs/add-*'", words="+")],
    *,
    out: Annotated[Path | None, Argument(OUT, "FILE")] = None,
    target: Annotated[float | None, Argument(TARGET, "VALUE")] = None,
    baseline: Annotated[str | None, Argument(BASELINE, "NAME")] = None,
    over: Annotated[str | None, Argument(OVER, "FIELD")] = None,
    metric: Annotated[Sequence[str], Argument(METRIC, "NAME", words="append")] = (),
    format: TableFormat = "text",
    as_json: AsJson = False,
) -> None:
    """Write the page, and print the final table; in another format than text, the page only with `--out`."""
    from proxima.experiments.cell_statistics import final_value
    from proxima.experiments.run_comparison import compare_runs
    from proxima.experiments.run_reader import find_runs
    from proxima.view.comparison_files import comparison_file, table_text_as, write_comparison_file

    form = chosen_format(format, as_json)
    if out is not None:
        comparison_file(out)
    folders = find_runs(run)
    runs, unread = _read(folders)
    keys = {name: _recorded(name, runs) for name in metric}
    evaluated = {key for each in runs for record in each.evals for key, value in record.items() if value is not None}
    headline = next((key for key in keys.values() if key in evaluated), None)
    comparison = compare_runs(runs, baseline=baseline, target=target, metric=headline)
    page = out
    if page is None and form == "text":
        place = Path(run[0])
        page = (place if len(run) == 1 and place.is_dir() and place not in folders else Path()) / "compare.html"
    replaced = out is None and page is not None and page.exists()
    if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
        raise UserError(f"--out {page}: must be a file in a folder that exists")
    means: dict[str, dict[str, SeedMean]] = {}
    for name, key in keys.items():
        ends = {cell.name: cell.over_seeds(final_value(key)) for cell in comparison.cells}
        if recorded := {cell: mean for cell, mean in ends.items() if mean is not None}:
            means[name] = recorded
    numbers = {name: {cell: vars(mean) for cell, mean in cells.items()} for name, cells in means.items()}
    more = {**({"metrics": numbers} if numbers else {}), "unread": unread, "page": None if page is None else str(page)}
    if page is not None:
        title = Path(run[0]).resolve().name if len(run) == 1 else "Comparison"
        write_comparison_file(comparison, page, title=title, over=over, more=more)
    if form != "text":
        print(table_text_as(form, comparison, more), end="")
        return
    _show(comparison, unread)
    for name, cells in means.items():
        _show_metric(keys[name], cells)
    print(f"\n{page}{' (replaced)' if replaced else ''}")


def _read(folders: Sequence[Path]) -> "tuple[list[Run], list[str]]":
    """Read the runs; if there are several, also return why some can't be compared yet."""
    from proxima.experiments.run_reader import NoMetrics, read_run

    runs, unread = [], []
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


def _recorded(name: str, runs: "Sequence[Run]") -> str:
    """The key of a metric that a step or an evaluation has recorded; UserError with the nearest ones if none has."""
    from proxima.evaluation.headline import Headline
    from proxima.experiments.metric_names import canonical_metric

    records = [record for run in runs for record in (*run.train, *run.evals)]
    headline = Headline.of(records, canonical_metric(name))
    if all(headline.value(record) is None for record in records):
        recorded = sorted({word for record in records for key in record for word in (key, Headline(key).name)})
        near = ", ".join(difflib.get_close_matches(name, recorded, n=3, cutoff=0.0)) or "none"
        remedy = f"the nearest: {near}; all are keys of {runs[0].folder / 'metrics.jsonl'}"
        raise UserError(f"--metric {name}: no run has recorded it", remedy=remedy)
    return headline.key


def _show_metric(name: str, means: dict[str, "SeedMean"]) -> None:
    from proxima.view.formatting import printable, significant

    print(f"\n{name}, mean over the last tenth of the steps")
    width = max(map(len, means))
    for cell, mean in means.items():
        half = "" if mean.half is None else f" ± {significant(mean.half)}"
        print(f"  {printable(cell):<{width}}  {significant(mean.mean)}{half}")


def _show(comparison: "RunComparison", unread: list[str]) -> None:
    from proxima.view.comparison_page import table_columns
    from proxima.view.formatting import printable
    from proxima.view.terminal import stacked, table_text

    for text in (*comparison.warnings, *unread):
        print(f"WARNING {printable(text)}", file=sys.stderr)
    rows = [
        {name: printable(text) for name, text in table_columns(row, comparison).items()} for row in comparison.rows()
    ]
    width = min(WIDTH, terminal_width(sys.stdout) or WIDTH)
    tables = (table_text(block, sys.stdout, width=width) for block in stacked(rows, width))
    print("\n\n".join(tables))
    for note in comparison.notes:
        print(textwrap.fill(f"note: {printable(note)}", width, subsequent_indent="      ", break_on_hyphens=False))


COMMAND = compare
