"""Simulated runs on increasing numbers of devices: rows, sentences, and a page with both curves. Needs no network."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from proxima.config.resolved import ResolvedValue
from proxima.data.atomic_files import write_atomic
from proxima.lab.simulate.scale import (
    DECODE,
    LONGEST,
    NETWORK,
    PAYS,
    PUBLISH,
    REST,
    UPDATE,
    ScaledRun,
    gain,
    lasting_cause,
    stops_paying,
)
from proxima.view.chart import chart_axes, new_figure, page_svg, variable
from proxima.view.formatting import NONE, count, fixed
from proxima.view.page import render
from proxima.view.simulation_page import shortened

Pairs = Sequence[tuple[ScaledRun, ScaledRun]]
KINDS = ("synchronous", "asynchronous")
SIZE = (1080, 320)
WHY = {  # cause → why more devices do not shorten it
    LONGEST: "it runs on one engine, as fast as it would alone, and others wait for it",
    DECODE: "engines read their weights and caches for each token",
    UPDATE: "optimizer steps with few sequences for each rank take as long as the longest of these",
    NETWORK: "ranks wait for each other's layers and gradients",
    PUBLISH: "every step sends all weights to the engines",
    REST: "data, rewards and advantages",
}


def scale_rows(pairs: Pairs) -> list[dict[str, str]]:
    """Return a row for each run, by column."""
    return [_row(run) for pair in pairs for run in pair]


def _row(run: ScaledRun) -> dict[str, str]:
    none = bool(run.refused)
    return {
        "devices": count(run.devices),
        "run": "async" if run.lag else "sync",
        "engines": run.where,
        "tok/s": NONE if none else count(run.tokens_per_second),
        "per device": NONE if none else count(run.per_device),
        "step s": NONE if none else fixed(run.step_seconds, 1),
        "binds": run.refused if none else f"{run.binds} {100 * run.spent[run.binds]:.0f} %",
    }


def sentences(pairs: Pairs) -> list[str]:
    """Say for each kind of run where more devices stop paying off, and why; empty for a single number of devices."""
    return [_sentence(name, [pair[i] for pair in pairs]) for i, name in enumerate(KINDS) if len(pairs) > 1]


def _sentence(name: str, runs: Sequence[ScaledRun]) -> str:
    fitting = [run for run in runs if not run.refused]
    if len(fitting) < 2:
        return f"{name}: fewer than two of these numbers of devices can run it"
    last = stops_paying(runs)
    if last is None:
        return f"{name}: up to {fitting[-1].devices:,} devices, twice as many give at least {PAYS:g} × the speed"
    larger = fitting[fitting.index(last) + 1]
    cause = lasting_cause(last, larger)
    return (
        f"{name}: from {last.devices:,} devices on, twice as many give less than {PAYS:g} × the speed "
        f"({fixed(gain(last, larger))} ×); on {larger.devices:,}, {cause} takes {100 * larger.spent[cause]:.0f} % of a "
        f"step: {WHY[cause]}"
    )


def write_scale(path: Path, title: str, pairs: Pairs, times: Sequence[ResolvedValue]) -> None:
    """Write the page.

    Raises: OSError if the folder is missing or the disk is full; an earlier page stays intact.
    """
    rows = scale_rows(pairs)
    values: dict[str, Any] = {
        "title": title,
        "head": list(rows[0]),
        "table": [list(row.values()) for row in rows],
        "sentences": sentences(pairs),
        "picture": speed_picture(pairs),
        "times": [(entry.path, shortened(entry), entry.source, entry.help) for entry in times],
    }
    write_atomic(path, render("scale", styles=("report.css", "simulation.css"), **values))


def speed_picture(pairs: Pairs) -> Markup:
    """Draw tokens per second over devices on logarithmic axes: where a line is flat, more devices don't pay off."""
    label = "tokens per second over the number of devices"
    counts = [float(sync.devices) for sync, _ in pairs]
    with new_figure(SIZE, label) as figure:
        axes = chart_axes(figure, [counts[0], counts[-1] * 1.001], (0.0, 1.0), margins=(70, 14, 16, 26))
        speeds = [run.tokens_per_second for pair in pairs for run in pair if not run.refused] or [1.0]
        axes.set(xscale="log", yscale="log", xlim=(counts[0] / 1.1, counts[-1] * 1.1))
        axes.set_ylim(min(speeds) / 1.3, max(speeds) * 1.3)
        axes.set_xticks(counts, [f"{n:,.0f}" for n in counts], minor=False)
        axes.set_xticks([], minor=True)
        ticks = [d * 10**e for e in range(10) for d in (1, 2, 5) if min(speeds) / 1.3 <= d * 10**e <= max(speeds) * 1.3]
        axes.set_yticks(ticks, [f"{n:,.0f}" for n in ticks], minor=False)
        axes.set_yticks([], minor=True)
        for i, color in enumerate("ab"):
            runs = [pair[i] for pair in pairs if not pair[i].refused]
            axes.plot(
                [run.devices for run in runs],
                [run.tokens_per_second for run in runs],
                color=variable(color),
                marker="o",
                linewidth=1.8,
            )
        return page_svg(figure, label)
