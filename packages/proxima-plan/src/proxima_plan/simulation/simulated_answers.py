"""The answers of `proxima plan` by simulation, as facts for --json and as text: lags, and numbers of devices."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from proxima.config.resolved import Resolved
from proxima.view.formatting import NONE, count, fixed, percent
from proxima.view.stage_progress import StageProgress
from proxima.view.terminal import table_text
from proxima_plan.answers import Answer
from proxima_plan.devices import Devices
from proxima_plan.simulation.lags import SimulatedCell, simulate_lags
from proxima_plan.simulation.scale import ScaledRun, conclusions, simulate_scale
from proxima_plan.simulation.times import Assumptions

Cells = TypeVar("Cells")


def lagging(resolved: Resolved[Any], devices: Devices, assumed: Assumptions, lags: Sequence[int]) -> Answer:
    """A table of simulated runs, one for each lag and number of concurrent prompts."""
    cells = _with_progress("runs", partial(simulate_lags, resolved, devices, assumed, lags))
    steps = cells[0].figures.steps
    facts = {"devices": str(devices), "steps": steps, "cells": [cell.as_json() for cell in cells]}
    return (
        facts,
        f"{table_text([_lag_row(cell) for cell in cells], sys.stdout)}\n\n{steps} simulated steps each, on {devices}",
    )


def scaled(resolved: Resolved[Any], devices: Sequence[Devices], assumed: Assumptions, lag: int) -> Answer:
    """A table of two simulated runs for each number of devices, and what follows from them."""
    pairs = _with_progress("numbers of devices", partial(simulate_scale, resolved, devices, assumed, lag))
    runs = [{"synchronous": sync.as_json(), "asynchronous": beside.as_json()} for sync, beside in pairs]
    summary = conclusions(pairs)
    table = table_text([_scale_row(run) for pair in pairs for run in pair], sys.stdout, left=("run", "binds"))
    return {"runs": runs, "summary": summary}, "\n".join([table, "", *summary])


def _with_progress(unit: str, simulate: Callable[[Callable[[int, int], None]], Cells]) -> Cells:
    """Simulate, and show how far it is."""
    progress = StageProgress(sys.stderr)
    cells = simulate(lambda done, total: progress.update("simulate", done, total, unit))
    progress.clear()
    return cells


def _lag_row(cell: SimulatedCell) -> dict[str, str]:
    """Return the row of a lag, by column."""
    figures = cell.figures
    concurrent = "sync" if cell.concurrent is None else str(cell.concurrent)
    return {
        "lag": str(cell.lag),
        "concurrent": concurrent,
        "tok/s": count(figures.tokens_per_second),
        "steps/h": fixed(figures.steps_per_hour, 1),
        "trainer idle": percent(figures.idle_trainer),
        "engine idle": percent(figures.idle_engine),
        "mean lag": fixed(figures.mean_lag),
        "max lag": count(figures.max_lag),
        "evicted": count(figures.evicted),
        "× lag 0": fixed(cell.speed_up),
    }


def _scale_row(run: ScaledRun) -> dict[str, str]:
    """Return the row of a number of devices, by column."""
    kind = "async" if run.lag else "sync"
    row = {"devices": count(run.devices), "run": kind}
    if run.layout:
        row["engines"] = f"{run.layout.engines} × {run.layout.engine_devices}"
        row["tok/s"] = count(run.tokens_per_second)
        row["per device"] = count(run.per_device)
        row["step s"] = fixed(run.step_seconds, 1)
    else:
        row |= {"engines": NONE, "tok/s": NONE, "per device": NONE, "step s": NONE}
    return row | {"binds": run.binds}
