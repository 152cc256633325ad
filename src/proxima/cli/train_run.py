"""`proxima train`: prints how a run goes and ends, and returns its exit code."""

import sys
from collections.abc import Sequence
from pathlib import Path

from proxima.api.run_start import resolve_run, train_here, train_on_ranks, views_of
from proxima.config.families import family_name
from proxima.runtime.loop.training_loop import NothingTrained, RunEnded
from proxima.runtime.placement.launcher import is_first, places_ranks
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.summary import Summary


def train_from_shell(
    recipe: str, overrides: Sequence[str], *, resume: bool, overwrite: bool, accept_changes: bool, quiet: bool
) -> int:
    """Train what the recipe asks for, as `train`, and print how the run ended; return the exit code."""
    quiet = quiet or not is_first()  # the first one prints for all processes of a run
    resolved = resolve_run(recipe, overrides, resume=resume, overwrite=overwrite, accept_changes=accept_changes)
    config = resolved.config
    if resume and not quiet:
        note_new_run(Path(config.folder).expanduser())
    if places_ranks(config):
        code, _ = train_on_ranks(
            resolved, recipe, overrides, resume=resume, overwrite=overwrite, accept_changes=accept_changes, quiet=quiet
        )
        return code
    views = views_of(resolved, quiet=quiet)
    views.progress("check", 0, 1, "recipes")
    try:
        summary = train_here(resolved, views, resume=resume, overwrite=overwrite, accept_changes=accept_changes)
        status = summary.status
        if quiet and is_first():
            print(outcome(summary))
    except NothingTrained as end:
        note = "nothing was trained, so the exit code is 1"
        if quiet:  # else the run's last line says it
            note = str(end)
        print(f"note: {note}", file=sys.stderr)
        status = end.status
    except RunEnded as end:  # the run detected that it can't continue: not a bug
        if not end.reported:
            print(f"error: {end}", file=sys.stderr)
        status = end.status
    except Exception as error:
        vars(error)["run_folder"] = views.run_folder  # `report_bug` writes into its log.txt
        raise
    if family_name(config) == "reward" and not quiet and views.run_folder is not None:
        print_last_evaluation(views.run_folder)
    return {"done": 0, "stopped": 130}.get(status, 1)


def print_last_evaluation(folder: Path) -> None:
    """Print the table of the last evaluation of a reward model."""
    records = [record for record in RunFolder(folder).read_metrics() if record["kind"] == "eval"]
    if records:
        from proxima.view.eval_tables import pair_rows
        from proxima.view.terminal import table_text

        print(table_text(pair_rows(records[-1]), sys.stdout))


def note_new_run(folder: Path) -> None:
    """Say that `--resume` finds no run in the folder and starts one: its name may be a typo."""
    if not RunFolder(folder).has_run:
        print(f"note: {folder} contains no run to resume: a new run starts there", file=sys.stderr)


def outcome(summary: Summary) -> str:
    """`done  40 steps in 195 s  accuracy 0.125 → 0.940  runs/add-7f3c`."""
    measured = [record for record in summary.eval.values() if record["value"] is not None]
    values = " → ".join(f"{record['value']:.3f}" for record in measured)
    if measured:
        figure = f"  {measured[0]['metric']} {values}"
    else:
        figure = ""
    return f"{summary.status}  {summary.steps} steps in {summary.seconds:.0f} s{figure}  {summary.folder}"
