"""compare.html: cells of runs side by side, in one file that needs no network and can be sent by e-mail.

It shows curves over steps, tokens and time (mean and 95 % interval over seeds), the final table, and the config fields
in which the cells differ. All numbers come from `experiments.run_comparison`; folder names and config values are
escaped by jinja.
"""

import math
import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from proxima.config.scalars import in_one_line
from proxima.data import UserError
from proxima.evaluation.headline import REWARD, Headline
from proxima.experiments.cell_statistics import HELD_OUT, CellSummary, SeedBand, SeedMean, TargetCost
from proxima.experiments.run_comparison import RunComparison
from proxima.system.atomic_files import write_atomic
from proxima.view.chart import CELLS, cell_colors
from proxima.view.formatting import NONE, count, duration, fixed, magnitude, signed, significant
from proxima.view.microscope.trend import metric_meanings
from proxima.view.page import render

LOOKS = ("", " again", " dotted")  # of the first eight cells, which have a colour each, and of the next ones
SHARES = frozenset({"masked_fraction", "accuracy", "rewards/accuracies"})
TIE = 0.1  # an axis spans at least this for a share, else this part of its values, so that ties look like ties
DOTS = 30  # up to this many evaluations of a run, each is drawn as a dot
AXES = {  # axis: its name on the page
    "step": "steps",
    "time": "training clock, s",
    "cpu": "CPU time, s",
    "generated": "tokens generated",
    "trained": "tokens trained",
}
CHARTS = (
    HELD_OUT,
    "reward/mean",
    "length/mean",
    "episode/turns/mean",
    "episode/calls",
    "entropy/mean",
    "approx_kl",
    "masked_fraction",
    "grad_norm",
    "mismatch/log_prob_absdiff_mean",
    "time/step",
)
EXAMPLE_CHARTS = (  # for runs on fixed data sets
    HELD_OUT,
    "loss",
    "accuracy",
    "rewards/accuracies",
    "rewards/margins",
    "grad_norm",
    "time/step",
)


def write_comparison(
    comparison: RunComparison, path: Path | str, *, title: str = "Comparison", over: str | None = None
) -> Path:
    """Write the page and return its path; `over` names a field of the config, see `over_field`.

    Raises:
        UserError: `over` is not a number that differs between the cells.
        OSError: the folder is missing or the disk is full; an earlier page stays intact.
    """
    path = Path(path)
    values = page_values(comparison, over)
    write_atomic(path, render("compare", style=cell_colors(), title=title, over=over, **values))
    return path


def page_values(comparison: RunComparison, over: str | None = None) -> dict[str, Any]:
    """Return everything that the page shows: formatted numbers, and `answers`, from which its curves are drawn."""
    rows = comparison.rows()
    cells = [{"name": cell.name, "look": look(i), "n": len(cell.used)} for i, cell in enumerate(comparison.cells)]
    charts = curves(comparison)
    if over is not None:
        charts += over_field(comparison, rows, over)
    axes = [{"key": axis, "name": name} for axis, name in AXES.items() if axis in comparison.axes]
    target = None
    if comparison.target is not None:
        target = fixed(comparison.target, 3).rstrip("0")
    paired = paired_columns(comparison)
    return {
        "cells": cells,
        "headline": comparison.headline.title,
        "runs": sum(len(cell.runs) for cell in comparison.cells),
        "baseline": comparison.baseline.name,
        "target": target,
        "has_charts": bool(charts),
        "answers": {"comparison": {"cells": cells, "axes": axes, "charts": charts}},
        "intervals": interval_bars(rows, comparison.headline),
        "head": [*table_columns(rows[0], comparison)],
        "table": [glued([*table_columns(row, comparison).values()]) for row in rows],
        "training": "Training figures" if comparison.offline else "Training reward",
        "paired_head": ["cell", "common seeds", *(PAIRED.get(name, name) for name in paired)],
        "paired": [paired_row(row, paired) for row in rows if row.difference],
        "differing": [(path, list(map(config_value, values))) for path, values in comparison.differing.items()],
        "warnings": comparison.warnings,
        "notes": comparison.notes,
    }


def paired_columns(comparison: RunComparison) -> list[str]:
    """The figures that are compared seed by seed."""
    names = ["after", "best"]
    if not comparison.offline:
        names.append("reward")
    return [*names, *comparison.figures, "clock", "cpu"]


def paired_row(row: CellSummary, names: Sequence[str]) -> list[str]:
    """A cell's row of the table of differences."""
    seeds = max(mean.n for mean in row.difference.values())
    return glued([row.cell, str(seeds), *(paired_text(row, name) for name in names)])


def glued(row: Sequence[str]) -> list[str]:
    """Join numbers with their unit or sign by non-breaking spaces in the texts of a row."""
    return [row[0], *(re.sub(r"(?<![a-z]{2}) (?![(+±])", "\u00a0", text) for text in row[1:])]


def look(index: int) -> str:
    """Return the class of a cell: its colour and, from the ninth cell on, its dashes."""
    return CELLS[index % len(CELLS)] + LOOKS[min(index // len(CELLS), len(LOOKS) - 1)]


def curves(comparison: RunComparison) -> list[dict[str, Any]]:
    """Return the charts of the page, each with a line of every cell over each axis; those that no cell has recorded,
    or whose values are all 0, are left out."""
    keys = EXAMPLE_CHARTS if comparison.offline else CHARTS
    charts = []
    for key in keys:
        of_cells = [cell.band(key) for cell in comparison.cells]
        bands = [band for band in of_cells if band is not None]
        if not any(means_of(bands)):
            continue
        if key == HELD_OUT:
            title = f"held-out {comparison.headline.title}"
            meaning = "mean over the held-out questions; dots are evaluations"
            target = comparison.target
            dots = all(len(band.x) <= DOTS for band in bands)
        else:
            title = key
            _, meaning = metric_meanings([key])[key]
            target = None
            dots = False
        charts.append(
            {
                "title": title,
                "explanation": meaning,
                "ends": chart_range(key, bands, comparison.headline),
                "lines": {axis: [line(cell.band(key, axis)) for cell in comparison.cells] for axis in comparison.axes},
                "target": target,
                "dots": dots,
            }
        )
    return charts


def means_of(bands: Sequence[SeedBand]) -> list[float]:
    """All points of the curves."""
    return list(chain.from_iterable(band.mean for band in bands))


def chart_range(key: str, bands: Sequence[SeedBand], headline: Headline) -> tuple[float, float]:
    """Return the range of a chart's axis: of a share, and of a reward in [0, 1], it ends at 1."""
    if key == HELD_OUT and headline.share:
        return visible_range(bands, 1.0, TIE)
    means = means_of(bands)
    if key in SHARES or (key == REWARD and min(means) >= 0 and max(means) <= 1):
        return visible_range(bands, 1.0)
    return visible_range(bands, math.inf)


def line(band: SeedBand | None) -> dict[str, Sequence[float]] | None:
    """Return a cell's curve with the edges of its area; None for a cell without it."""
    if band is None:
        return None
    return {name: getattr(band, name) for name in ("x", "mean", "low", "high")}


def widened(low: float, high: float, least: float, highest: float) -> tuple[float, float]:
    """Widen a range to at least `least` and `TIE` of its values, but not beyond `highest` or, if positive, below 0."""
    wanted = max(least, TIE * max(abs(low), abs(high)))
    missing = max(0.0, wanted - (high - low))
    lowest = 0.0 if low >= 0 else -math.inf
    low = low - missing / 2
    high = high + missing / 2
    shift = max(lowest - low, 0.0) - max(high - highest, 0.0)
    return max(low + shift, lowest), min(high + shift, highest)


def visible_range(bands: Sequence[SeedBand], highest: float, least: float = 0.0) -> tuple[float, float]:
    """Return the range of the axis: the means with a margin of a third of their range, within the possible values of
    the quantity, and wide enough for ties to look like ties.

    The wide interval of three seeds would flatten every line; such a band is cut off at the edge instead. With two
    seeds, both values are shown.
    """
    values: list[float] = []
    for band in bands:
        values += band.mean
        if band.n == 2:
            values += [*band.low, *band.high]
    low = min(values)
    high = max(values)
    margin = (high - low) / 3
    lowest = -math.inf if low < 0 else 0.0
    return widened(max(low - margin, lowest), min(high + margin, highest), least, highest)


def over_field(comparison: RunComparison, rows: Sequence[CellSummary], field: str) -> list[dict[str, Any]]:
    """Return what each cell reached and what it cost, over the value that it has in a field: the held-out figure at its
    end, and the training clock."""
    values_of_cells = comparison.differing.get(field, ())
    if not are_numbers(values_of_cells):
        fields = [path for path, values in comparison.differing.items() if are_numbers(values)]
        problem = f"--over {field}: must be a number in the recipe, and differ between the cells"
        raise UserError(problem, remedy=f"such are: {', '.join(fields) or 'none'}")
    charts = []
    for title, key in ((f"held-out {comparison.headline.title}", end_of(rows)), ("training clock, s", "clock")):
        dots: list[SeedBand | None] = []
        edges: list[float] = []
        for x, row in zip(values_of_cells, rows, strict=True):
            mean: SeedMean | None = getattr(row, key)
            if mean is None:
                dots.append(None)
            else:
                dots.append(SeedBand((float(x),), (mean.mean,), (mean.low,), (mean.high,)))
                edges += [mean.low, mean.high]
        if edges:
            charts.append(
                {
                    "title": title,
                    "explanation": "mean over seeds and its 95 % t interval",
                    "over": field,
                    "ends": widened(min(edges), max(edges), 0.0, math.inf),
                    "lines": {"only": list(map(line, dots))},
                    "target": None,
                    "dots": True,
                }
            )
    return charts


def end_of(rows: Sequence[CellSummary]) -> str:
    """Which held-out figure is a run's end: that after training, or the best one if no run was evaluated at its end."""
    return "after" if any(row.after for row in rows) else "best"


def are_numbers(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def interval_bars(rows: Sequence[CellSummary], headline: Headline) -> dict[str, Any] | None:
    """Show the held-out figure after training (the best one if no run was evaluated at its end) as a bar per cell on a
    common axis, with a dot per seed.

    The axis shows every seed with a margin of a third of their range, within the possible values of the figure. A bar
    whose interval exceeds that, as with two seeds, has an open end (`cut`): it would squeeze all seeds into one spot.
    """
    key = end_of(rows)
    measured: list[SeedMean | None] = [getattr(row, key) for row in rows]
    means = [(i, rows[i].cell, mean) for i, mean in enumerate(measured) if mean is not None]
    if not means:
        return None
    seeds = list(chain.from_iterable(mean.values for _, _, mean in means))
    widest = max(mean.half or 0.0 for _, _, mean in means)
    margin = (max(seeds) - min(seeds)) / 3 or widest or 0.1 * abs(seeds[0]) or 1.0
    low = min(seeds) - margin
    high = max(seeds) + margin
    if headline.share:
        low, high = widened(max(0.0, low), min(1.0, high), TIE, 1.0)
    else:
        low, high = widened(low, high, 0.0, math.inf)

    def place(value: float) -> float:
        percent = 100 * (value - low) / ((high - low) or 1.0)
        return round(min(max(percent, 0.0), 100.0), 2)

    def cut(mean: SeedMean) -> str:
        sides = {"open-left": mean.low < low, "open-right": mean.high > high}
        return " ".join(name for name, beyond in sides.items() if beyond)

    bars = []
    for i, name, mean in means:
        dots = list(map(place, mean.values)) if mean.n > 1 else []
        bars.append(
            {
                "name": name,
                "look": look(i),
                "text": plus_minus(mean),
                "at": place(mean.mean),
                "seeds": dots,
                "left": place(mean.low),
                "width": round(place(mean.high) - place(mean.low), 2),
                "cut": cut(mean),
            }
        )
    when = "after training" if key == "after" else "at its best"
    return {"when": when, "bars": bars, "low": fixed(low, 3), "high": fixed(high, 3)}


COSTS: dict[str, tuple[str, Callable[[float], str]]] = {  # axis: its column, and the format of a cost
    "step": ("steps", lambda v: fixed(v, 1)),
    "generated": ("tokens", magnitude),
    "time": ("clock", duration),
    "cpu": ("CPU", duration),
}
RATIOS = ("time", "cpu")


def table_columns(row: CellSummary, comparison: RunComparison) -> dict[str, str]:
    """Return a cell's row of the final table, by column."""
    seeds = str(row.n) if row.n == row.runs else f"{row.n} of {row.runs}"
    measures = {f"{comparison.headline.name} before": row.before, "after": row.after, "best": row.best}
    if not comparison.offline:
        measures["training reward"] = row.reward
    measures |= row.figures
    columns = {"cell": row.cell, "seeds": seeds, **{name: plus_minus(mean) for name, mean in measures.items()}}
    for axis, (name, write) in COSTS.items():
        if axis not in comparison.axes or axis not in row.reach:
            continue
        column = f"{name} to target"
        text = cost_text(row.reach[axis], write)
        if axis in RATIOS:
            column += " (×)"
            if row.cell != comparison.baseline.name:
                text += cost_ratio(row.reach[axis])
        columns[column] = text
    train = mean_as(duration, row.train)
    train_rate = mean_as(count, row.train_rate)
    columns["training clock"] = mean_as(duration, row.clock)
    if comparison.offline:
        return columns | {"train": train, "train tok/s": train_rate}
    return columns | {
        "generate + train": f"{mean_as(duration, row.generate)} + {train}",
        "gen, train tok/s": f"{mean_as(count, row.generate_rate)}, {train_rate}",
    }


def mean_as(write: Callable[[float], str], value: SeedMean | None) -> str:
    """The mean of a figure over the seeds, written so."""
    return write(value.mean) if value else NONE


def cost_text(cost: TargetCost, write: Callable[[float], str]) -> str:
    """`1m 40s`, `never`, `not yet`, `already reached` before the first step, and `1m 40s (2/3)` if not all seeds
    reached the target."""
    if not cost.values:
        return "not yet"
    if cost.median is None:
        text = "never"
    elif cost.median:
        text = write(cost.median)
    else:
        text = "already reached"
    if 0 < cost.reached < len(cost.values):
        return f"{text} ({cost.reached}/{len(cost.values)})"
    return text


def cost_ratio(cost: TargetCost) -> str:
    """` (1.67 ×)`: the baseline's cost over this one's; ` (1.67 × of 2)` if fewer seeds are common; empty if the median
    is undetermined, and for a target never reached, which has no cost."""
    if cost.ratio is None or cost.median is None:
        return ""
    ratio = "∞" if cost.ratio == math.inf else fixed(cost.ratio, 2)
    of = f" of {cost.pairs}" if cost.pairs < len(cost.values) else ""
    return f" ({ratio} ×{of})"


PAIRED = {"after": "after", "best": "best", "reward": "training reward", "clock": "clock", "cpu": "CPU"}


def paired_text(row: CellSummary, name: str) -> str:
    """`+0.021 ± 0.010`."""
    mean = row.difference.get(name)
    if mean is None:
        return NONE
    if name in ("clock", *RATIOS):  # seconds
        return f"{signed(mean.mean, 1)}{half_width(mean, 1)} s"
    return signed(mean.mean, 3) + half_width(mean, 3)


def half_width(mean: SeedMean, places: int) -> str:
    """` ± 0.012`; empty for a single seed."""
    return "" if mean.half is None else f" ± {fixed(mean.half, places)}"


def config_value(value: object) -> str:
    """Format a config value on one line."""
    if value is None:
        return NONE
    if isinstance(value, float):
        return significant(value, 6)
    return in_one_line(value)


def plus_minus(value: SeedMean | None, places: int = 3) -> str:
    """`0.940 ± 0.012`; only the mean for a single seed."""
    if value is None:
        return NONE
    return fixed(value.mean, places) + half_width(value, places)
