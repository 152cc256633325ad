"""The page of `proxima simulate`: a table of the cells, and the first and best cell over time. Needs no network."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from proxima.config.resolved import ResolvedValue
from proxima.data.atomic_files import write_atomic
from proxima.lab.simulate.grid import SimulatedCell
from proxima.lab.simulate.simulated_run import SpeedFigures
from proxima.view.chart import chart_axes, new_figure, page_svg, variable
from proxima.view.comparison_page import config_value
from proxima.view.formatting import count, fixed, percent
from proxima.view.page import render

STEPS_SHOWN = 6  # the last steps of the run, in the picture
HEAT = 0.55  # opacity of the strongest colour

Value = Callable[[SpeedFigures], float]
COLUMNS: dict[str, tuple[Value, Callable[[float], str], int]] = {  # value, format, +1 if more is better, else -1
    "tok/s": (lambda f: f.tokens_per_second, count, 1),
    "steps/h": (lambda f: f.steps_per_hour, lambda v: fixed(v, 1), 1),
    "trainer idle": (lambda f: f.idle_trainer, percent, -1),
    "engine idle": (lambda f: f.idle_engine, percent, -1),
    "mean lag": (lambda f: f.mean_lag, fixed, -1),
    "max lag": (lambda f: f.max_lag, count, -1),
    "evicted": (lambda f: f.evicted, count, -1),
}


def cell_row(cell: SimulatedCell) -> dict[str, str]:
    """Return a cell's row, by column."""
    concurrent = "sync" if cell.concurrent is None else str(cell.concurrent)
    figures = {name: write(value(cell.run.figures)) for name, (value, write, _) in COLUMNS.items()}
    return {"lag": str(cell.lag), "concurrent": concurrent, **figures, "× lag 0": fixed(cell.speed_up)}


def write_simulation(
    path: Path, title: str, cells: Sequence[SimulatedCell], times: Sequence[ResolvedValue], notes: Sequence[str]
) -> None:
    """Write the page.

    Raises: OSError if the folder is missing or the disk is full; an earlier page stays intact.
    """
    best = max(cells, key=lambda cell: cell.run.figures.tokens_per_second)
    pictured = [cells[0]] if best is cells[0] else [cells[0], best]
    values: dict[str, Any] = {
        "title": title,
        "steps": count(len(cells[0].run.steps)),
        "head": list(cell_row(cells[0])),
        "table": [heated_row(cell, cells) for cell in cells],
        "pictures": [{"name": cell_name(cell), "svg": timeline_picture(cell)} for cell in pictured],
        "times": [(entry.path, shortened(entry), entry.source, entry.help) for entry in times],
        "notes": notes,
    }
    write_atomic(path, render("simulation", styles=("report.css", "simulation.css"), **values))


def cell_name(cell: SimulatedCell) -> str:
    return "lag 0, synchronous" if cell.concurrent is None else f"lag {cell.lag}, {cell.concurrent} prompts at once"


def shortened(entry: ResolvedValue) -> str:
    """Format a value; a long list of observed values as their number and mean."""
    if isinstance(entry.value, list) and len(entry.value) > 8:
        return f"{count(len(entry.value))} values, mean {fixed(sum(entry.value) / len(entry.value))}"
    return config_value(entry.value)


def heated_row(cell: SimulatedCell, cells: Sequence[SimulatedCell]) -> list[dict[str, Any]]:
    """Return the texts of a row with the opacity of their backgrounds: strongest for the best of a column."""
    heat = {"× lag 0": _share([other.speed_up for other in cells], cell.speed_up)}
    for name, (value, _, sign) in COLUMNS.items():
        heat[name] = _share([sign * value(other.run.figures) for other in cells], sign * value(cell.run.figures))
    return [{"text": text, "heat": fixed(HEAT * heat.get(name, 0.0), 3)} for name, text in cell_row(cell).items()]


def _share(values: Sequence[float], value: float) -> float:
    low, high = min(values), max(values)
    return (value - low) / (high - low) if high > low else 0.0


def timeline_picture(cell: SimulatedCell) -> Markup:
    """Draw the last steps of the run: training and publishing times, above the number of running completions."""
    run = cell.run
    last = run.steps[-STEPS_SHOWN:]
    end = last[-1]["time"]
    begin = last[0]["time"] - last[0]["time/step"]
    changes = [(begin, 0), *((max(at, begin), n) for at, n in run.running if at <= end), (end, 0)]
    changes[-1] = (end, changes[-2][1])
    changes[0] = (begin, next((n for at, n in reversed(run.running) if at <= begin), 0))
    shown = [pair for i, pair in enumerate(changes) if i == 0 or pair[0] > begin]
    most = max(n for _, n in shown) or 1
    label = f"{cell_name(cell)}: the last {len(last)} steps"
    with new_figure((1080, 190), label) as figure:
        axes = chart_axes(figure, [begin, end], (0.0, most), margins=(46, 10, 46, 22))
        axes.fill_between(
            [at for at, _ in shown], [n for _, n in shown], step="post", color=variable("a"), alpha=0.35, linewidth=0
        )
        top = axes.get_ylim()[1]
        for spans, color, at in ((run.trained, "b", 1.06), (run.published, "e", 1.19)):
            pieces = [(max(a, begin), min(b, end) - max(a, begin)) for a, b in spans if a < end and b > begin]
            axes.broken_barh(pieces, (at * top, 0.09 * top), color=variable(color), clip_on=False, linewidth=0)
        return page_svg(figure, label)
