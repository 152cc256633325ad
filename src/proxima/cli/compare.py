"""Compare runs: one page with curves, intervals over seeds and the final table, which is printed as well."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from proxima.cli.parameters import Argument, AsJson, TableFormat, chosen_format

OUT = (
    "by its suffix: the page (.html), its curves as a figure (.svg, .png, .pdf), or the table (.csv, .json, .md); "
    "default: compare.html in the sweep's folder, else in the current one"
)
TARGET = "also print the cost of reaching this held-out accuracy or reward"
BASELINE = "the variant that the others are compared with; default: the first"
OVER = "also plot the result and the cost of each variant against this field of the recipe"
METRIC = (
    "metric to compare, under any of its names, or a reward's name (default: accuracy, or else the mean reward); its "
    "mean over the last tenth of the steps is printed too; repeatable: the first that evaluations have is compared"
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
    form = chosen_format(format, as_json)
    from proxima.view.comparison_files import compare_and_print

    compare_and_print(run, out=out, target=target, baseline=baseline, over=over, metrics=metric, form=form)


COMMAND = compare
