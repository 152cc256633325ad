"""compare.html: cells of runs beside each other, in one file that needs no network and can be mailed.

Curves against steps, tokens and time, mean and 95 % interval over seeds; the final table; what sets the cells apart.
Everything that is read here was computed by `lab.run_comparison`; names of folders and values of configs reach the page
through jinja's escaping.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from proxima.config.scalars import in_one_line
from proxima.data.atomic_files import write_whole
from proxima.lab.run_comparison import CellRuns, CellSummary, RunComparison, SeedBand, TargetCost
from proxima.lab.seed_statistics import SeedMean
from proxima.view.chart import Series, line_chart
from proxima.view.formatting import NONE, count, duration, fixed, magnitude, signed, significant

HERE = Path(__file__).parent
COLORS, DASHES = 8, ("", "7 3", "2 3")  # --k0 … --k7 of compare.css; the ninth cell has the first colour again, dashed
DOTS = 30  # evaluations of a run up to which each is a dot


@dataclass(frozen=True)
class Axis:
    """What the curves are drawn against: its name on the button, what the button's curves say, and the larger units of
    its numbers."""

    name: str
    tells: str
    units: tuple[tuple[float, str], ...]


AXES = {
    "step": Axis("steps", "steps", ((1, "steps"),)),
    "time": Axis("time", "training clock", ((1, "s"), (60, "min"), (3600, "h"))),
    "cpu": Axis("CPU time", "CPU time of the training process", ((1, "s"), (60, "min"), (3600, "h"))),
    "generated": Axis(
        "tokens generated", "tokens generated", ((1, "tokens"), (1e3, "k tokens"), (1e6, "M tokens"), (1e9, "B tokens"))
    ),
    "trained": Axis(
        "tokens trained", "tokens trained", ((1, "tokens"), (1e3, "k tokens"), (1e6, "M tokens"), (1e9, "B tokens"))
    ),
}
ENOUGH = 10  # a larger unit is taken when the axis is at least so long in it

# title, key, what it tells, factor
CURVES: tuple[tuple[str, str, str, float], ...] = (
    ("Held-out accuracy", "accuracy/held_out", "share of held-out questions answered right; dots are evaluations", 1.0),
    ("Training reward", "reward/mean", "mean over the valid completions of a step", 1.0),
    ("Length", "length/mean", "tokens of a completion", 1.0),
    ("Entropy", "entropy/mean", "nats a token", 1.0),
    ("KL", "approx_kl", "nats a token, how far an update moved the policy", 1.0),
    ("Masked", "masked_fraction", "% of tokens, outside the trust region", 100.0),
    ("Gradient norm", "grad_norm", "before clipping", 1.0),
    ("Engine against trainer", "rollout_replay_logp_absdiff_mean", "mean |Δ log-prob|, nats a token", 1.0),
    ("Seconds a step", "time/step", "generating, scoring, training, publishing", 1.0),
)
SHARES = ("accuracy/held_out", "masked_fraction")  # between 0 and 1


def write_comparison(comparison: RunComparison, path: Path | str, *, title: str = "Comparison") -> Path:
    """Write the page and return where it lies.

    Raises:
        OSError: the folder is missing, or the disk is full; a former page stays whole.
    """
    script = (HERE / "compare.js").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((HERE / "compare.html.j2").read_text(encoding="utf-8"))
    style = "".join((HERE / name).read_text(encoding="utf-8") for name in ("report.css", "compare.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode()
    page = template.render(
        **gather(comparison), title=title, script=Markup(script), script_digest=digest, style=Markup(style)
    )
    write_whole(Path(path), page)
    return Path(path)


def gather(comparison: RunComparison) -> dict[str, Any]:
    """All that the page shows, with every number written out."""
    rows = comparison.rows()
    axes = [axis for axis in AXES if axis in comparison.axes]
    scales = {axis: scale_of(axis, comparison.cells) for axis in axes}
    legend = [
        {"name": cell.name, "color": color_of(i), "dash": dash_of(i), "n": len(cell.used)}
        for i, cell in enumerate(comparison.cells)
    ]
    return {
        "cells": legend,
        "runs": sum(len(cell.runs) for cell in comparison.cells),
        "baseline": comparison.baseline.name,
        "target": None if comparison.target is None else fixed(comparison.target, 3).rstrip("0"),
        "axes": [{"key": axis, "name": AXES[axis].name, "tells": title_of(axis, scales[axis][1])} for axis in axes],
        "charts": [chart for curve in CURVES if (chart := chart_of(comparison, scales, *curve)) is not None],
        "intervals": intervals(rows),
        "head": head_of(comparison),
        "table": [table_row(row, comparison) for row in rows],
        "paired": paired_rows(rows),
        "differing": [(path, [shown(value) for value in values]) for path, values in comparison.differing.items()],
        "warnings": comparison.warnings,
        "notes": comparison.notes,
    }


def color_of(index: int) -> str:
    return f"var(--k{index % COLORS})"


def dash_of(index: int) -> str:
    return DASHES[min(index // COLORS, len(DASHES) - 1)]


def title_of(axis: str, unit: str) -> str:
    """`training clock, min`; `k tokens generated`."""
    name = AXES[axis].tells
    return name.replace(unit.split()[-1], unit, 1) if unit.split()[-1] in name else f"{name}, {unit}"


def scale_of(axis: str, cells: Sequence[CellRuns]) -> tuple[float, str]:
    """The unit in which the longest run makes a readable number, as (size, name)."""
    longest = max((max(run.position(axis).values()) for cell in cells for run in cell.used), default=0.0)
    fitting = [unit for unit in AXES[axis].units if longest >= ENOUGH * unit[0]]
    return fitting[-1] if fitting else AXES[axis].units[0]


def chart_of(
    comparison: RunComparison, scales: Mapping[str, tuple[float, str]], title: str, key: str, tells: str, factor: float
) -> dict[str, Any] | None:
    """A figure with a drawing for each axis; None where no cell has the key, or it is 0 throughout."""
    pictures = []
    for axis, (size, _) in scales.items():
        bands = [cell.band(key, axis) for cell in comparison.cells]
        if not any(band and any(band.mean) for band in bands):
            return None
        low, high = bounds_of(bands, 1.0 if key in SHARES else float("inf"))
        within = (factor * low, factor * high)
        few = key == "accuracy/held_out" and all(len(band.x) <= DOTS for band in bands if band)
        series = [replace(series_of(i, band, size, factor), dots=few) for i, band in enumerate(bands)]
        if key == "accuracy/held_out" and comparison.target is not None:
            places = [x for s in series for x, _ in s.points]
            line = [(min(places), comparison.target), (max(places), comparison.target)]
            series.append(Series(name="target", points=line, color="var(--muted)", dash="2 4"))
        picture = line_chart(
            series, label=f"{title} against {AXES[axis].tells}", within=within, width=440, height=230, left=50
        )
        pictures.append({"axis": axis, "svg": picture})
    return {"title": title, "tells": tells, "pictures": pictures}


def bounds_of(bands: Sequence[SeedBand | None], highest: float) -> tuple[float, float]:
    """What the axis has to show: a third of the means' range beyond them, and not beyond what the quantity can be.

    The interval of two seeds would else flatten every line; where it is wider, its area runs off the plot.
    """
    means = [value for band in bands if band for value in band.mean]
    low, high = min(means), max(means)
    room = (high - low) / 3
    return (low - room if low < 0 else max(0.0, low - room)), min(high + room, highest)


def series_of(index: int, band: SeedBand | None, size: float, factor: float) -> Series:
    """A cell's curve with its area, in the units of the axis."""
    if band is None:
        return Series(name="", points=())
    points = [(x / size, factor * y) for x, y in zip(band.x, band.mean, strict=True)]
    area = [(factor * a, factor * b) for a, b in zip(band.low, band.high, strict=True)]
    return Series(name="", points=points, color=color_of(index), band=area, dash=dash_of(index))


def intervals(rows: Sequence[CellSummary]) -> dict[str, Any] | None:
    """Accuracy after training, a bar a cell, on an axis that spans them all. Where no run was evaluated at its end: the
    best of each.

    The axis ends at 0 and 1: a bar whose interval goes beyond has an open end there (`cut`).
    """
    key = "after" if any(row.after for row in rows) else "best"
    known: list[tuple[int, str, SeedMean]] = [
        (i, row.cell, e) for i, row in enumerate(rows) if (e := getattr(row, key)) is not None
    ]
    if not known:
        return None
    low, high = min(e.low for _, _, e in known), max(e.high for _, _, e in known)
    low, high = max(0.0, low - 0.05 * (high - low)), min(1.0, high + 0.05 * (high - low))
    span = high - low or 1.0

    def place(value: float) -> float:
        return round(min(max(100 * (value - low) / span, 0.0), 100.0), 2)

    def cut(e: SeedMean) -> str:
        return " ".join(name for name, beyond in (("open-left", e.low < low), ("open-right", e.high > high)) if beyond)

    bars = [
        {
            "name": name,
            "color": color_of(i),
            "text": plus_minus(e),
            "at": place(e.mean),
            "left": place(e.low),
            "width": round(place(e.high) - place(e.low), 2),
            "cut": cut(e),
        }
        for i, name, e in known
    ]
    return {
        "what": "after training" if key == "after" else "at its best",
        "bars": bars,
        "low": fixed(low, 3),
        "high": fixed(high, 3),
    }


def head_of(comparison: RunComparison) -> list[str]:
    """Names of the columns of the final table."""
    known = [axis for axis in COSTS if axis in comparison.axes and comparison.target is not None]
    costs = [f"{COSTS[axis]} to target{' (×)' if axis in RATIOS else ''}" for axis in known]
    return [
        "cell",
        "seeds",
        "before",
        "after",
        "best",
        "reward",
        *costs,
        "clock, all",
        "generate + train",
        "gen, train tok/s",
    ]


COSTS = {"step": "steps", "generated": "tokens", "time": "clock", "cpu": "CPU"}
RATIOS = ("time", "cpu")
WRITTEN: dict[str, Callable[[float], str]] = {
    "step": lambda v: fixed(v, 1),
    "generated": magnitude,
    "time": duration,
    "cpu": duration,
}


def table_row(row: CellSummary, comparison: RunComparison) -> list[str]:
    """A cell's line, a text a column of `head_of`."""
    baseline = row.cell == comparison.baseline.name
    costs = [(axis, row.reach[axis]) for axis in COSTS if axis in comparison.axes and axis in row.reach]
    reach = [cost(r, WRITTEN[axis]) + ("" if baseline or axis not in RATIOS else ratio_of(r)) for axis, r in costs]
    seeds = str(row.n) if row.n == row.runs else f"{row.n} of {row.runs}"
    accuracy = [plus_minus(value) for value in (row.before, row.after, row.best, row.reward)]
    clock, generate, train = (duration(value.mean) if value else NONE for value in (row.clock, row.generate, row.train))
    rates = ", ".join(count(value.mean) if value else NONE for value in (row.generate_rate, row.train_rate))
    return [row.cell, seeds, *accuracy, *reach, clock, f"{generate} + {train}", rates]


def cost(reach: TargetCost, write: Callable[[float], str]) -> str:
    """`1m 40s`, `never`, `not yet`, and `(2/3)` where not all seeds got there."""
    if not reach.values:
        return "not yet"
    text = "never" if reach.median is None else write(reach.median)
    return (
        text
        if reach.reached == len(reach.values) or not reach.reached
        else f"{text} ({reach.reached}/{len(reach.values)})"
    )


def ratio_of(reach: TargetCost) -> str:
    """` (1.67 ×)`: the baseline's cost over this one's, ` (1.67 × of 2)` where fewer seeds are common; nothing where no
    median tells."""
    if reach.ratio is None:
        return ""
    of = f" of {reach.pairs}" if reach.pairs < len(reach.values) else ""
    return f" ({'∞' if reach.ratio == float('inf') else fixed(reach.ratio, 2)} ×{of})"


def paired_rows(rows: Sequence[CellSummary]) -> list[list[str]]:
    """CellRuns, common seeds, then the difference of each measure."""
    return [
        [row.cell, str(max(e.n for e in row.difference.values())), *(difference(row, name) for name in PAIRED)]
        for row in rows
        if row.difference
    ]


PAIRED = ("after", "best", "reward", "clock", "cpu")


def difference(row: CellSummary, name: str) -> str:
    """`+0.021 ± 0.010`."""
    found = row.difference.get(name)
    if found is None:
        return NONE
    places = 1 if name in ("clock", "cpu") else 3
    unit = " s" if name in ("clock", "cpu") else ""
    return signed(found.mean, places) + (f" ± {fixed(found.half, places)}" if found.half is not None else "") + unit


def plus_minus(value: SeedMean | None, places: int = 3) -> str:
    """`0.940 ± 0.012`; the mean alone of a single seed."""
    if value is None:
        return NONE
    return fixed(value.mean, places) + (f" ± {fixed(value.half, places)}" if value.half is not None else "")


def shown(value: Any) -> str:
    """A value of a config in a line."""
    if value is None:
        return NONE
    return significant(value, 6) if isinstance(value, float) else in_one_line(value)
