"""Train the variants of a recipe that a sweep file lists, with several seeds. The same command resumes a stopped
sweep."""

from collections.abc import Sequence
from typing import Annotated

from proxima.cli.parameters import Argument, named_recipe

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
    from proxima.view.sweep_progress import planned_cells, print_cells, train_cells

    plan, runs = planned_cells(recipe, folder, jobs, only, import_code=import_code or not dry_run)
    if dry_run:
        return print_cells(plan, runs)
    return train_cells(plan, runs, retry_failed=retry_failed)


COMMAND = sweep
