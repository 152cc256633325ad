"""Train a model from a recipe: by reinforcement learning or, if the recipe has one of these sections, on a fixed data
set: `sft` on given answers, `reward_model` a reward model on pairs, `preference` by DPO and its relatives. Everything
that the run writes is in its folder, which is printed first."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from proxima.cli.output import Overrides, Recipe
from proxima.cli.parameters import Argument
from proxima.config.families import family_name

if TYPE_CHECKING:
    from proxima.runtime.state.summary import Summary

RESUME = "resume the run in the folder: %(prog)s runs/mine --resume"
ACCEPT = "with --resume: also with another algorithm, other rewards and the like; the run says so from then on"
REPLAY = "train on the stored rollouts of this run, without generating: rollouts=RUN"


def train_recipe(
    recipe: Recipe,
    override: Overrides = (),
    *,
    rollouts: Annotated[str | None, Argument(REPLAY, "RUN")] = None,
    resume: Annotated[bool, Argument(RESUME)] = False,
    accept_changes: Annotated[bool, Argument(ACCEPT)] = False,
    overwrite: Annotated[bool, Argument("delete the run in the folder and start again")] = False,
    quiet: Annotated[bool, Argument("print only the outcome")] = False,
) -> int:
    """Train what the recipe asks for. Returns the exit code.

    Raises:
        UserError: the recipe is wrong.
    """
    from proxima.api.run_config import resolve_run
    from proxima.config.validate import warnings
    from proxima.runtime.placement.launcher import is_first, places_ranks

    if rollouts is not None:
        override = [*override, f"rollouts={json.dumps(rollouts)}"]
    quiet = quiet or not is_first()  # the first one prints for all processes of a run
    begin: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "accept_changes": accept_changes}
    resolved = resolve_run(recipe, override, **begin)
    if resume and not quiet:
        note_new_run(Path(resolved.config.folder).expanduser())
    if places_ranks(resolved.config):
        from proxima.runtime.placement.ray_supervisor import train_on_ray

        return train_on_ray(resolved, recipe, override, {**begin, "quiet": quiet})[0]

    from proxima.view.run_views import RunViews

    config = resolved.config
    notes = [str(problem) for problem in warnings(resolved)]
    views = RunViews(None if quiet else sys.stdout, notes, config.monitor, config.view)
    views.progress("check", 0, 1, "recipes")  # before the libraries are imported, which takes seconds
    from proxima.runtime.launch.run import train
    from proxima.runtime.loop.training_loop import RunEnded

    try:
        with resolved.locating():
            summary = train(resolved.config, resolved=resolved, observer=views, **begin)
        status = summary.status
        if quiet and is_first():
            print(outcome(summary))
    except RunEnded as end:  # the run detected that it can't continue: not a bug
        if not end.reported:
            print(f"error: {end}", file=sys.stderr)
        status = "failed"
    except Exception as error:
        error.run_folder = views.run_folder  # type: ignore[attr-defined]  # `report_bug` writes into its log.txt
        raise
    if family_name(config) == "reward" and not quiet and views.run_folder is not None:
        print_last_evaluation(views.run_folder)
    return {"done": 0, "stopped": 130}.get(status, 1)


def print_last_evaluation(folder: Path) -> None:
    """Print the table of the last evaluation of a reward model."""
    from proxima.runtime.state.folder import RunFolder
    from proxima.view.eval_tables import pair_rows
    from proxima.view.terminal import table_text

    records = [record for record in RunFolder(folder).read_metrics() if record["kind"] == "eval"]
    if records:
        print(table_text(pair_rows(records[-1]), sys.stdout))


def note_new_run(folder: Path) -> None:
    """Say that `--resume` finds no run in the folder and starts one: its name may be a typo."""
    from proxima.runtime.state.folder import RunFolder

    if not RunFolder(folder).has_run:
        print(f"note: {folder} contains no run to resume: a new run starts there", file=sys.stderr)


def outcome(summary: "Summary") -> str:
    """`done  40 steps in 195 s  accuracy 0.125 → 0.940  runs/add-7f3c`."""
    measured = [record for record in summary.eval.values() if record["value"] is not None]
    values = " → ".join(f"{record['value']:.3f}" for record in measured)
    figure = f"  {measured[0]['metric']} {values}" if measured else ""
    return f"{summary.status}  {summary.steps} steps in {summary.seconds:.0f} s{figure}  {summary.folder}"


COMMAND = train_recipe
