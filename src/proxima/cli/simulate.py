"""Simulate a recipe in virtual time: speed, idle shares and lag for several lags and numbers of concurrent prompts, or
for many numbers of devices.

The loop is that of `proxima train`; engine, rewards and trainer only take time. Their durations come from a run
(--from), a YAML file (--times) and times.KEY=VALUE, each overriding the one before; with --devices from a plan. Runs
only proxima's own code, unless --import-code is given."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from proxima.cli.output import AsJson, ImportCode, Overrides, Recipe, check_page, print_json
from proxima.cli.parameters import Argument
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.config.resolved import ResolvedValue
    from proxima.lab.simulate.grid import SimulatedCell

FITTED = "a run folder, to which lengths and times are fitted"
DEVICES = (
    "numbers of devices and their kind, instead of lags: 8-1024xH800-80G (each twice the one before), or 8,24xH20-96G"
)
LAG = "values of runtime.max_lag; default 0,1,2,4; with --devices one, default 1"
CONCURRENT = "values of runtime.max_concurrent_rollouts; default: the recipe's, or the prompts of 1 and 2 steps"


def _numbers(text: str) -> list[int]:
    """Parse `0,1,4` into numbers, without repetition."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas: 0,1,4") from None
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers >= 0")
    return list(dict.fromkeys(numbers))


def simulate(
    recipe: Recipe,
    override: Overrides = (),
    *,
    fitted: Annotated[str | None, Argument(FITTED, "RUN", flag="--from")] = None,
    times: Annotated[Path | None, Argument("YAML file of lengths and times", "FILE")] = None,
    devices: Annotated[str | None, Argument(DEVICES, "NxNAME")] = None,
    lag: Annotated[Sequence[int], Argument(LAG, "N,N", read=_numbers)] = (),
    concurrent: Annotated[Sequence[int], Argument(CONCURRENT, "N,N", read=_numbers)] = (),
    steps: Annotated[
        int | None, Argument("steps of each run; default: the recipe's, at most 200; with --devices 4", "N")
    ] = None,
    html: Annotated[Path | None, Argument("also write a page", "PAGE")] = None,
    import_code: ImportCode = False,
    as_json: AsJson = False,
) -> None:
    """Print a table of the runs, and write the page."""
    from proxima.cli.simulate_scale import simulate_on_devices
    from proxima.config import resolve
    from proxima.config.recipe_reader import with_values
    from proxima.lab.simulate.fit import Fit, fit_times
    from proxima.lab.simulate.grid import MOST_STEPS, simulate_grid
    from proxima.lab.simulate.times import PREFIX, read_times
    from proxima.view.terminal import StageProgress

    if steps is not None and steps < 2:
        raise UserError(f"--steps {steps}: must be at least 2")
    if 0 in concurrent:
        raise UserError("--concurrent 0: must be numbers >= 1")
    if times is not None and not times.is_file():
        raise UserError(f"--times {times}: no such file")
    if html is not None:
        check_page("--html", html)
    if devices and (fitted or concurrent):
        option = "--from" if fitted else "--concurrent"
        raise UserError(f"{option}: has no meaning with --devices, whose times are planned; leave it out")
    of_times = [word for word in override if word.startswith(PREFIX)]
    of_recipe = [word for word in override if not word.startswith(PREFIX)]
    resolved = resolve(recipe, of_recipe, import_code=import_code)
    fit = fit_times(fitted, {entry.path: entry.value for entry in resolved.entries}) if fitted else Fit()
    drawn, entries = read_times(times, of_times, fit.values, fitted or "")
    refuse_what_differs(of_recipe)
    if devices is not None:
        simulate_on_devices(resolved, devices, drawn, entries, lags=lag, steps=steps, html=html, as_json=as_json)
        return
    steps = steps or min(resolved.config.train.steps, MOST_STEPS)
    progress = StageProgress(sys.stderr)
    cells = simulate_grid(
        recipe,
        with_values(of_recipe, {"train.steps": steps}),
        drawn,
        lag or (0, 1, 2, 4),
        concurrent,
        lambda done, total: progress.update("simulate", done, total, "runs"),
        import_code=import_code,
    )
    progress.clear()
    _show(Path(recipe).stem, cells, entries, [*fit.notes, *defaults_note(entries)], html=html, as_json=as_json)


def _show(
    title: str,
    cells: "Sequence[SimulatedCell]",
    entries: "tuple[ResolvedValue, ...]",
    notes: Sequence[str],
    *,
    html: Path | None,
    as_json: bool,
) -> None:
    from proxima.view.simulation_page import cell_row, write_simulation
    from proxima.view.terminal import rendered, table_of_rows

    steps = len(cells[0].run.steps)
    if html is not None:
        write_simulation(html, title, cells, entries, notes)
    if as_json:
        sources = {entry.path: {"value": entry.value, "source": entry.source} for entry in entries}
        facts: dict[str, Any] = {"steps": steps, "cells": [cell.as_json() for cell in cells], "times": sources}
        print_json({**facts, "notes": notes, "page": None if html is None else str(html)})
        return
    print(rendered(table_of_rows([cell_row(cell) for cell in cells]), sys.stdout))
    print("\n".join([f"\n{steps} simulated steps each", *(f"note: {note}" for note in notes)]))
    if html is not None:
        print(f"\n{html}")


def refuse_what_differs(overrides: Sequence[str]) -> None:
    """Raise UserError for an override of a field that the runs vary, because an option sets it."""
    for field, option in (("runtime.max_lag", "--lag"), ("runtime.max_concurrent_rollouts", "--concurrent")):
        if given := next((word for word in overrides if word.startswith(f"{field}=")), None):
            raise UserError(f"{given}: the runs vary this field", remedy=f"use {option} {given.partition('=')[2]}")


def defaults_note(entries: "tuple[ResolvedValue, ...]") -> list[str]:
    """A line that lists the times that were neither given nor fitted; none if there are no such times."""
    from proxima.config.scalars import in_one_line

    left = [
        f"{entry.path}={in_one_line(entry.value)}"
        for entry in entries
        if entry.origin == "default" and not entry.path.endswith(".kind")
    ]
    return [f"neither given nor fitted, so the default: {', '.join(left)}"] if left else []


COMMAND = simulate
