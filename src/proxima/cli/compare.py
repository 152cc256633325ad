"""Compare runs: one page with curves, intervals over seeds and the final table, which is printed as well."""

import argparse
import difflib
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.cli.output import print_json, terminal_width
from proxima.data import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxima.lab import Run, RunComparison, SeedMean

WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", nargs="+", help="run folders, a sweep's folder, or patterns: 'runs/add-*'")
    add("--out", metavar="FILE", help="the page; default: compare.html in the sweep's folder, else in the current one")
    add(
        "--target", type=float, metavar="VALUE", help="also print the cost of reaching this held-out accuracy or reward"
    )
    add("--baseline", metavar="NAME", help="the variant that the others are compared with; default: the first")
    metric = "what is compared if evaluations have it (default: accuracy, or else the mean reward); its mean over the "
    metric += "last tenth of the steps is printed too; any of its names, or a reward's name; repeatable"
    add("--metric", action="append", default=[], metavar="NAME", help=metric)
    add("--json", action="store_true", help="print the numbers for programs; the page only with --out")


def run(arguments: argparse.Namespace) -> int:
    from proxima.lab import NoMetrics, compare_runs, final_value, find_runs, read_run

    folders = find_runs(arguments.run)
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
    keys = {name: _recorded(name, runs) for name in arguments.metric}
    evaluated = {key for r in runs for record in r.evals for key, value in record.items() if value is not None}
    headline = next((key for key in keys.values() if key in evaluated), None)
    comparison = compare_runs(runs, baseline=arguments.baseline, target=arguments.target, metric=headline)
    page, replaced = Path(arguments.out) if arguments.out else None, False
    if page is None and not arguments.json:
        whole = len(arguments.run) == 1 and Path(arguments.run[0]).is_dir() and Path(arguments.run[0]) not in folders
        page = (Path(arguments.run[0]) if whole else Path()) / "compare.html"
        replaced = page.exists()
    if page is not None:
        from proxima.view.comparison_page import write_comparison

        if page.is_dir() or not page.absolute().parent.is_dir():
            raise UserError(f"--out {page}: must be a file in a folder that exists")
        title = Path(arguments.run[0]).resolve().name if len(arguments.run) == 1 else "Comparison"
        write_comparison(comparison, page, title=title)
    metrics: dict[str, dict[str, SeedMean]] = {}
    for name, key in keys.items():
        ends = {cell.name: cell.over_seeds(final_value(key)) for cell in comparison.cells}
        if means := {cell: mean for cell, mean in ends.items() if mean is not None}:
            metrics[name] = means
    if arguments.json:
        found = {name: {cell: vars(mean) for cell, mean in means.items()} for name, means in metrics.items()}
        more = {"metrics": found} if found else {}
        print_json({**comparison.as_json(), **more, "unread": unread, "page": None if page is None else str(page)})
    else:
        _show(comparison, unread)
        for name, means in metrics.items():
            _show_metric(keys[name], means)
        print(f"\n{page}{' (replaced)' if replaced else ''}")
    return 0


def _recorded(name: str, runs: "Sequence[Run]") -> str:
    """The key of a metric that a step or an evaluation has; UserError with the nearest ones if none has."""
    from proxima.evaluate.headline import Headline
    from proxima.runtime.watch.metric_names import canonical_metric

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
    from proxima.view.comparison_page import table_head, table_row
    from proxima.view.formatting import printable
    from proxima.view.terminal import rendered, stacked, table_of_rows

    for text in (*comparison.warnings, *unread):
        print(f"WARNING {printable(text)}", file=sys.stderr)
    head = table_head(comparison)
    rows = [dict(zip(head, map(printable, table_row(row, comparison)), strict=True)) for row in comparison.rows()]
    width = min(WIDTH, terminal_width(sys.stdout) or WIDTH)
    tables = (rendered(table_of_rows(block), sys.stdout, width) for block in stacked(rows, width))
    print("\n\n".join(tables))
    for note in comparison.notes:
        print(textwrap.fill(f"note: {printable(note)}", width, subsequent_indent="      ", break_on_hyphens=False))
