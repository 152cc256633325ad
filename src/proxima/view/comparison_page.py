"""compare.html: cells of runs side by side, in one file that needs no network and can be sent by e-mail.

It shows curves over steps, tokens and time (mean and 95 % interval over seeds), the final table, and the config fields
in which the cells differ. All numbers come from `experiments.run_comparison`; folder names and config values are
escaped by jinja.
"""

import math
import re
from collections.abc import Callable, Sequence
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
    *(HELD_OUT, "reward/mean", "length/mean", "episode/turns/mean", "episode/calls", "entropy/mean", "approx_kl"),
    *("masked_fraction", "grad_norm", "mismatch/log_prob_absdiff_mean", "time/step"),
)
EXAMPLE_CHARTS = (  # for runs on fixed data sets
    *(HELD_OUT, "loss", "accuracy", "rewards/accuracies", "rewards/margins", "grad_norm", "time/step"),
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
    cells = [{"name": c.name, "look": look(i), "n": len(c.used)} for i, c in enumerate(comparison.cells)]
    charts = curves(comparison) + ([] if over is None else over_field(comparison, rows, over))
    axes = [{"key": axis, "name": name} for axis, name in AXES.items() if axis in comparison.axes]
    rewarded = () if comparison.offline else ("reward",)
    paired = ["after", "best", *rewarded, *comparison.figures, "clock", "cpu"]  # compared seed by seed
    return {
        "cells": cells,
        "headline": comparison.headline.title,
        "runs": sum(len(cell.runs) for cell in comparison.cells),
        "baseline": comparison.baseline.name,
        "target": None if comparison.target is None else fixed(comparison.target, 3).rstrip("0"),
        "has_charts": bool(charts),
        "answers": {"comparison": {"cells": cells, "axes": axes, "charts": charts}},
        "intervals": interval_bars(rows, comparison.headline),
        "head": [*table_columns(rows[0], comparison)],
        "table": [glued([*table_columns(row, comparison).values()]) for row in rows],
        "training": "Training figures" if comparison.offline else "Training reward",
        "paired_head": ["cell", "common seeds", *(PAIRED.get(name, name) for name in paired)],
        "paired": [
            glued(
                [row.cell, str(max(m.n for m in row.difference.values())), *(paired_text(row, key) for key in paired)]
            )
            for row in rows
            if row.difference
        ],
        "differing": [(path, list(map(config_value, values))) for path, values in comparison.differing.items()],
        "warnings": comparison.warnings,
        "notes": comparison.notes,
    }


def glued(row: Sequence[str]) -> list[str]:
    """Join numbers with their unit or sign by non-breaking spaces in the texts of a row."""
    return [row[0], *(re.sub(r"(?<![a-z]{2}) (?![(+±])", "\u00a0", text) for text in row[1:])]


def look(index: int) -> str:
    """Return the class of a cell: its colour and, from the ninth cell on, its dashes."""
    return CELLS[index % len(CELLS)] + LOOKS[min(index // len(CELLS), len(LOOKS) - 1)]


def curves(comparison: RunComparison) -> list[dict[str, Any]]:
    """Return the charts of the page, each with a line of every cell over each axis; those that no cell has recorded,
    or whose values are all 0, are left out."""
    charts = []
    for key in EXAMPLE_CHARTS if comparison.offline else CHARTS:
        bands = [cell.band(key) for cell in comparison.cells]
        means = [mean for band in bands if band for mean in band.mean]
        if not any(means):
            continue
        held_out = key == HELD_OUT
        judged = held_out and comparison.headline.share
        share = judged or key in SHARES or (key == REWARD and min(means) >= 0 and max(means) <= 1)
        if held_out:
            meaning = "mean over the held-out questions; dots are evaluations"
        else:
            meaning = metric_meanings([key])[key][1]
        charts.append(
            {
                "title": f"held-out {comparison.headline.title}" if held_out else key,
                "explanation": meaning,
                "ends": visible_range(bands, 1.0 if share else math.inf, TIE if judged else 0.0),
                "lines": {a: [line(cell.band(key, a)) for cell in comparison.cells] for a in comparison.axes},
                "target": comparison.target if held_out else None,
                "dots": held_out and all(len(band.x) <= DOTS for band in bands if band),
            }
        )
    return charts


def line(band: SeedBand | None) -> dict[str, Sequence[float]] | None:
    """Return a cell's curve with the edges of its area; None for a cell without it."""
    if band is None:
        return None
    return {name: getattr(band, name) for name in ("x", "mean", "low", "high")}


def widened(low: float, high: float, least: float, highest: float) -> tuple[float, float]:
    """Widen a range to at least `least` and `TIE` of its values, but not beyond `highest` or, if positive, below 0."""
    missing = max(0.0, max(least, TIE * max(abs(low), abs(high))) - (high - low))
    lowest = 0.0 if low >= 0 else -math.inf
    low = low - missing / 2
    high = high + missing / 2
    shift = max(lowest - low, 0.0) - max(high - highest, 0.0)
    return max(low + shift, lowest), min(high + shift, highest)


def visible_range(bands: Sequence[SeedBand | None], highest: float, least: float = 0.0) -> tuple[float, float]:
    """Return the range of the axis: the means with a margin of a third of their range, within the possible values of
    the quantity, and wide enough for ties to look like ties.

    The wide interval of three seeds would flatten every line; such a band is cut off at the edge instead. With two
    seeds, both values are shown.
    """
    means = [v for band in bands if band for v in (*band.mean, *(band.low + band.high if band.n == 2 else ()))]
    low = min(means)
    high = max(means)
    margin = (high - low) / 3
    return widened(low - margin if low < 0 else max(0.0, low - margin), min(high + margin, highest), least, highest)


def over_field(comparison: RunComparison, rows: Sequence[CellSummary], field: str) -> list[dict[str, Any]]:
    """Return what each cell reached and what it cost, over the value that it has in a field: the held-out figure at its
    end, and the training clock."""
    if not are_numbers(values_of_cells := comparison.differing.get(field, ())):
        fields = [path for path, values in comparison.differing.items() if are_numbers(values)]
        problem = f"--over {field}: must be a number in the recipe, and differ between the cells"
        raise UserError(problem, remedy=f"such are: {', '.join(fields) or 'none'}")
    charts = []
    for title, key in ((f"held-out {comparison.headline.title}", end_of(rows)), ("training clock, s", "clock")):
        means: list[SeedMean | None] = [getattr(row, key) for row in rows]
        dots = [
            None if m is None else SeedBand((float(x),), (m.mean,), (m.low,), (m.high,))
            for x, m in zip(values_of_cells, means, strict=True)
        ]
        edges = [edge for dot in dots if dot for edge in (*dot.low, *dot.high)]
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
    seeds = [value for _, _, mean in means for value in mean.values]
    margin = (
        (max(seeds) - min(seeds)) / 3 or max(mean.half or 0.0 for _, _, mean in means) or 0.1 * abs(seeds[0]) or 1.0
    )
    low = min(seeds) - margin
    high = max(seeds) + margin
    if headline.share:
        low = max(0.0, low)
        high = min(1.0, high)
    low, high = widened(low, high, TIE if headline.share else 0.0, 1.0 if headline.share else math.inf)

    def place(value: float) -> float:
        return round(min(max(100 * (value - low) / ((high - low) or 1.0), 0.0), 100.0), 2)

    def cut(mean: SeedMean) -> str:
        sides = {"open-left": mean.low < low, "open-right": mean.high > high}
        return " ".join(name for name, beyond in sides.items() if beyond)

    bars = [
        {
            "name": name,
            "look": look(i),
            "text": plus_minus(mean),
            "at": place(mean.mean),
            "seeds": [place(value) for value in mean.values] if mean.n > 1 else [],
            "left": place(mean.low),
            "width": round(place(mean.high) - place(mean.low), 2),
            "cut": cut(mean),
        }
        for i, name, mean in means
    ]
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
    if row.n == row.runs:
        seeds = str(row.n)
    else:
        seeds = f"{row.n} of {row.runs}"
    measures = {f"{comparison.headline.name} before": row.before, "after": row.after, "best": row.best}
    measures |= {} if comparison.offline else {"training reward": row.reward}
    measures |= row.figures
    columns = {"cell": row.cell, "seeds": seeds, **{name: plus_minus(mean) for name, mean in measures.items()}}
    for axis, (name, write) in COSTS.items():
        if axis in comparison.axes and axis in row.reach:
            if axis in RATIOS and row.cell != comparison.baseline.name:
                ratio = cost_ratio(row.reach[axis])
            else:
                ratio = ""
            column = f"{name} to target{' (×)' if axis in RATIOS else ''}"
            columns[column] = cost_text(row.reach[axis], write) + ratio
    clock, generate, train = (duration(value.mean) if value else NONE for value in (row.clock, row.generate, row.train))
    rates = [count(value.mean) if value else NONE for value in (row.generate_rate, row.train_rate)]
    if comparison.offline:
        return columns | {"training clock": clock, "train": train, "train tok/s": rates[1]}
    speed = {"generate + train": f"{generate} + {train}", "gen, train tok/s": ", ".join(rates)}
    return columns | {"training clock": clock} | speed


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
    some = 0 < cost.reached < len(cost.values)
    if some:
        return f"{text} ({cost.reached}/{len(cost.values)})"
    return text


def cost_ratio(cost: TargetCost) -> str:
    """` (1.67 ×)`: the baseline's cost over this one's; ` (1.67 × of 2)` if fewer seeds are common; empty if the median
    is undetermined, and for a target never reached, which has no cost."""
    if cost.ratio is None or cost.median is None:
        return ""
    if cost.pairs < len(cost.values):
        of = f" of {cost.pairs}"
    else:
        of = ""
    return f" ({'∞' if cost.ratio == float('inf') else fixed(cost.ratio, 2)} ×{of})"


PAIRED = {"after": "after", "best": "best", "reward": "training reward", "clock": "clock", "cpu": "CPU"}


def paired_text(row: CellSummary, name: str) -> str:
    """`+0.021 ± 0.010`."""
    mean = row.difference.get(name)
    if mean is None:
        return NONE
    places, unit = (1, " s") if name in RATIOS or name == "clock" else (3, "")
    return signed(mean.mean, places) + (f" ± {fixed(mean.half, places)}" if mean.half is not None else "") + unit


def config_value(value: Any) -> str:
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
    return fixed(value.mean, places) + (f" ± {fixed(value.half, places)}" if value.half is not None else "")
