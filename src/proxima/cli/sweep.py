"""Train the variants of a recipe that a sweep file lists, with several seeds. The same command resumes a stopped
sweep."""

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from proxima.cli.output import named_recipe
from proxima.cli.parameters import Argument

if TYPE_CHECKING:
    from proxima.experiments.sweep_plan import PlannedRun, Sweep

SWEEP = "YAML file: recipe, seeds, set, grid, cells; or a sweep of `proxima list recipes`: sweeps/grpo_cppo"
FOLDER = "where the runs are written; overrides the file; default runs/<file>"
ONLY = "only these cells; a pattern like '*lr=1e-5' selects several"
IMPORT_CODE = "with --dry-run: import the classes and functions outside proxima that the recipe names"


def sweep(
    recipe: Annotated[str, Argument(SWEEP, "sweep", read=named_recipe)],
    *,
    jobs: Annotated[int | None, Argument("parallel runs; overrides the file", "N")] = None,
    folder: Annotated[str | None, Argument(FOLDER, "F")] = None,
    only: Annotated[Sequence[str], Argument(ONLY, "CELL", words="+")] = (),
    dry_run: Annotated[bool, Argument("validate every cell, print the commands, run nothing")] = False,
    import_code: Annotated[bool, Argument(IMPORT_CODE)] = False,
    retry_failed: Annotated[bool, Argument("also retry the runs that failed")] = False,
) -> int:
    """Train the cells, or print their commands; return the exit code."""
    from proxima.experiments.sweep_file import read_sweep
    from proxima.experiments.sweep_plan import plan_runs

    plan = read_sweep(recipe, folder=folder, jobs=jobs, only=only)
    runs = plan_runs(plan, import_code=import_code or not dry_run)
    return _show(plan, runs) if dry_run else train_cells(plan, runs, retry_failed=retry_failed)


def train_cells(sweep: "Sweep", runs: "list[PlannedRun]", *, retry_failed: bool = False) -> int:
    """Run the sweep, show its progress, and compare its runs; return the exit code."""
    from proxima.cli.compare import compare
    from proxima.experiments.run_progress import RunState
    from proxima.experiments.sweep_runner import run_sweep
    from proxima.system.atomic_files import make_folder
    from proxima.view.sweep_progress import SweepLines

    make_folder(sweep.folder)
    with (sweep.folder / "log.txt").open("a", encoding="utf-8", errors="replace") as log:
        progresses = run_sweep(sweep, runs, SweepLines(log), SweepLines(sys.stdout), retry_failed=retry_failed)
    states = {progress.state for progress in progresses}
    if RunState.DONE in states:
        print()
        compare([str(sweep.folder)])
    if RunState.WAITING in states or RunState.STOPPED in states:
        print("stopped; the same command resumes")
        return 130
    return 1 if RunState.FAILED in states else 0


def _show(sweep: "Sweep", runs: "list[PlannedRun]") -> int:
    from proxima.view.sweep_progress import size_of

    print(f"{size_of(sweep)} in {sweep.folder}, {sweep.jobs} at a time\n")
    for run in runs:
        print(f"{run.name}\n    proxima train {shlex.join([str(run.recipe), *run.overrides])} --resume")
    return 0


COMMAND = sweep
