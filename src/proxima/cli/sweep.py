"""Train the variants of a recipe that a sweep file lists, with several seeds. The same command resumes a stopped
sweep."""

import argparse
import os
import shlex
import sys
from typing import TYPE_CHECKING

from proxima.cli.output import add_import_code, add_recipe

if TYPE_CHECKING:
    from proxima.lab import PlannedRun, Sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    meaning = "YAML file: recipe, seeds, set, grid, cells; or a sweep of `proxima list recipes`: sweeps/grpo_cppo"
    add_recipe(parser, meaning, metavar="sweep")
    add("--jobs", type=int, metavar="N", help="parallel runs; overrides the file")
    add("--folder", metavar="F", help="where the runs are written; overrides the file; default runs/<file>")
    only = "only these cells; a pattern like '*lr=1e-5' selects several"
    add("--only", nargs="+", default=[], metavar="CELL", help=only)
    add("--dry-run", action="store_true", help="validate every cell, print the commands, run nothing")
    add_import_code(parser, "with --dry-run: import the classes and functions outside proxima that the recipe names")
    add("--retry-failed", action="store_true", help="also retry the runs that failed")


def run(arguments: argparse.Namespace) -> int:
    from proxima.lab import plan_runs, read_sweep

    sweep = read_sweep(arguments.recipe, folder=arguments.folder, jobs=arguments.jobs, only=arguments.only)
    runs = plan_runs(sweep, import_code=arguments.import_code or not arguments.dry_run)
    if arguments.dry_run:
        return _show(sweep, runs)

    from rich.console import Console

    from proxima.lab.metrics_follower import RunState
    from proxima.lab.sweep_runner import run_sweep
    from proxima.view.sweep_progress import SweepLines, SweepTable, outcome_table
    from proxima.view.terminal import rendered

    sweep.folder.mkdir(parents=True, exist_ok=True)
    drawn = sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
    with (sweep.folder / "log.txt").open("a", encoding="utf-8", errors="replace") as log:
        screen = SweepTable(Console()) if drawn else SweepLines(sys.stdout)
        progresses = run_sweep(sweep, runs, SweepLines(log), screen, retry_failed=arguments.retry_failed)
    print()
    print(rendered(outcome_table(progresses), sys.stdout, width=160))
    states = {progress.state for progress in progresses}
    if RunState.DONE in states:
        print(f"\nproxima compare {shlex.quote(str(sweep.folder))}")
    if RunState.WAITING in states or RunState.STOPPED in states:
        print("stopped; the same command resumes")
        return 130
    return 1 if RunState.FAILED in states else 0


def _show(sweep: "Sweep", runs: "list[PlannedRun]") -> int:
    from proxima.config.families import command_of
    from proxima.view.sweep_progress import size_of

    print(f"{size_of(sweep)} in {sweep.folder}, {sweep.jobs} at a time\n")
    for run in runs:
        command = command_of(run.resolved.config)
        print(f"{run.name}\n    proxima {command} {shlex.join([str(run.recipe), *run.overrides])} --resume")
    return 0
