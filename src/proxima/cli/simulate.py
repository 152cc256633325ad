"""Simulate a recipe on virtual time: speed, idle shares and lag for several lags and concurrent prompts.

The loop is that of `proxima train`; engine, rewards and trainer only take time. What takes how long comes from a run
(--from), a YAML file (--times) and times.KEY=VALUE, each over the one before. Runs no code but proxima's, unless asked
to."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.cli.output import add_import_code, add_overrides, add_recipe, print_json
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.config.resolved import ResolvedValue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_overrides(parser)
    add = parser.add_argument
    add("--from", dest="run_fitted", metavar="RUN", help="a run folder, to which lengths and times are fitted")
    add("--times", metavar="FILE", help="YAML file of lengths and times")
    add("--lag", type=_numbers, default=[0, 1, 2, 4], metavar="N,N", help="values of runtime.max_lag; default 0,1,2,4")
    concurrent = "values of runtime.max_concurrent_rollouts; default: the recipe's, or the prompts of 1 and 2 steps"
    add("--concurrent", type=_numbers, default=[], metavar="N,N", help=concurrent)
    add("--steps", type=int, metavar="N", help="steps of each run; default: the recipe's, at most 200")
    add("--html", metavar="PAGE", help="also write a page")
    add_import_code(parser)
    add("--json", action="store_true", help="print everything for programs")


def run(arguments: argparse.Namespace) -> int:
    from proxima.config import resolve
    from proxima.lab.simulate.fit import fit_times
    from proxima.lab.simulate.grid import MOST_STEPS, simulate_grid
    from proxima.lab.simulate.times import PREFIX, read_times
    from proxima.view.simulation_page import cell_row, write_simulation
    from proxima.view.terminal import StageProgress, rendered, table_of_rows

    if arguments.steps is not None and arguments.steps < 2:
        raise UserError(f"--steps {arguments.steps}: must be at least 2")
    if 0 in arguments.concurrent:
        raise UserError("--concurrent 0: must be numbers >= 1")
    if arguments.times is not None and not Path(arguments.times).is_file():
        raise UserError(f"--times {arguments.times}: no such file")
    page = Path(arguments.html) if arguments.html else None
    if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
        raise UserError(f"--html {page}: must be a file in a folder that exists")
    of_times = [word for word in arguments.override if word.startswith(PREFIX)]
    overrides = [word for word in arguments.override if not word.startswith(PREFIX)]
    resolved = resolve(arguments.recipe, overrides, import_code=arguments.import_code)
    settings = {entry.path: entry.value for entry in resolved.entries}
    fit = fit_times(arguments.run_fitted, settings) if arguments.run_fitted else None
    file = Path(arguments.times) if arguments.times else None
    times, entries = read_times(file, of_times, fit.values if fit else None, arguments.run_fitted or "")
    steps = arguments.steps or min(resolved.config.train.steps, MOST_STEPS)
    progress = StageProgress(sys.stderr)
    cells = simulate_grid(
        arguments.recipe,
        [*overrides, f"train.steps={steps}"],
        times,
        arguments.lag,
        arguments.concurrent,
        lambda done, total: progress.update("simulate", done, total, "runs"),
        import_code=arguments.import_code,
    )
    progress.clear()
    notes = [*(fit.notes if fit else ()), *defaults_note(entries)]
    if page is not None:
        write_simulation(page, Path(arguments.recipe).stem, cells, entries, notes)
    if arguments.json:
        found = {entry.path: {"value": entry.value, "source": entry.source} for entry in entries}
        shown: dict[str, Any] = {"steps": steps, "cells": [cell.as_json() for cell in cells], "times": found}
        print_json({**shown, "notes": notes, "page": None if page is None else str(page)})
        return 0
    print(rendered(table_of_rows([cell_row(cell) for cell in cells]), sys.stdout))
    print(f"\n{steps} simulated steps each")
    for note in notes:
        print(f"note: {note}")
    if page is not None:
        print(f"\n{page}")
    return 0


def defaults_note(entries: "tuple[ResolvedValue, ...]") -> list[str]:
    """A line that names the times that nobody gave."""
    from proxima.config.scalars import in_one_line

    left = [
        f"{entry.path}={in_one_line(entry.value)}"
        for entry in entries
        if entry.origin == "default" and not entry.path.endswith(".kind")
    ]
    return [f"neither given nor fitted, so the default: {', '.join(left)}"] if left else []


def _numbers(text: str) -> list[int]:
    """`0,1,4` as numbers without repetition."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas: 0,1,4") from None
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers >= 0")
    return list(dict.fromkeys(numbers))
