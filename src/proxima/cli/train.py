"""The commands that train: `proxima train`, and one for each way to train on a fixed data set."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from proxima.cli.output import Overrides, Recipe, complete_override, override_help
from proxima.cli.parameters import Argument, Command
from proxima.config.families import FAMILIES, TRAIN, Family

if TYPE_CHECKING:
    from proxima.runtime.state.summary import Summary

WRITES = "Everything that the run writes is in its folder, which is printed first"
RESUME = "resume the run in the folder: %(prog)s runs/mine --resume"
ACCEPT = "with --resume: also with another algorithm, other rewards and the like; the run says so from then on"
REPLAY = "train on the stored rollouts of this run, without generating: rollouts=RUN"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options for starting a run and for its output."""

    resume: Annotated[bool, Argument(RESUME)] = False
    accept_changes: Annotated[bool, Argument(ACCEPT)] = False
    overwrite: Annotated[bool, Argument("delete the run in the folder and start again")] = False
    quiet: Annotated[bool, Argument("print only the outcome")] = False


FROM_THE_START = RunOptions()


def train(
    recipe: Recipe,
    override: Overrides = (),
    *,
    options: RunOptions = FROM_THE_START,
    rollouts: Annotated[str | None, Argument(REPLAY, "RUN")] = None,
) -> int:
    return train_recipe(recipe, override, rollouts=rollouts, **vars(options))


def command_on_data(family: Family) -> Command:
    """The command of a family that trains on a fixed data set."""
    words = Argument(override_help(family.example), "key=value", words="*", complete=complete_override)

    def train_offline(
        recipe: Recipe, override: Annotated[Sequence[str], words] = (), *, options: RunOptions = FROM_THE_START
    ) -> int:
        return train_recipe(recipe, override, command=family.command, **vars(options))

    return train_offline


def description(family: Family) -> str:
    """The description of the command in its `--help`."""
    section = f" Its recipes have a section `{family.own}`." if family.own else ""
    table = "; the table at the end is of the last evaluation" if family.prints_pairs else ""
    return f"{family.title[0].upper()}{family.title[1:]}.{section} {WRITES}{table}."


def train_recipe(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    command: str = "train",
    rollouts: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    accept_changes: bool = False,
    quiet: bool = False,
) -> int:
    """Train a recipe of a command. Returns the exit code.

    Args:
        rollouts: a run whose stored rollouts are trained on, without generating.
        quiet: print only the outcome.

    Raises:
        UserError: the recipe is wrong, or belongs to another command.
    """
    from proxima.api.run_config import config_notes, resolve_run
    from proxima.runtime.placement.process_group import check_before_imports, is_first, places_ranks

    if rollouts is not None:
        overrides = [*overrides, f"rollouts={json.dumps(rollouts)}"]
    quiet = quiet or not is_first()  # the first one prints for all processes of a run
    begin: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "accept_changes": accept_changes}
    resolved = resolve_run(recipe, overrides, root=FAMILIES[command].root, **begin)
    if resume and not quiet:
        note_new_run(Path(resolved.config.folder).expanduser())
    if places_ranks(resolved.config):
        from proxima.runtime.placement.ray_supervisor import train_on_ray

        return train_on_ray(resolved, recipe, overrides, command, {**begin, "quiet": quiet})[0]

    from proxima.view.run_views import RunViews

    with resolved.locating():
        check_before_imports(resolved, resume=resume, overwrite=overwrite)
    config = resolved.config
    views = RunViews(None if quiet else sys.stdout, config_notes(resolved), config.monitor, config.view)
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
    if FAMILIES[command].prints_pairs and not quiet and views.run_folder is not None:
        print_last_evaluation(views.run_folder)
    return exit_code(status)


def print_last_evaluation(folder: Path) -> None:
    """Print the table of the last evaluation of a reward model."""
    from proxima.runtime.state.folder import RunFolder
    from proxima.view.eval_tables import pair_table
    from proxima.view.terminal import rendered

    records = [record for record in RunFolder(folder).read_metrics() if record["kind"] == "eval"]
    if records:
        print(rendered(pair_table(records[-1]), sys.stdout))


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


def exit_code(status: str) -> int:
    """0 for a finished run, 130 after Ctrl-C, 1 for a failed run."""
    return {"done": 0, "stopped": 130}.get(status, 1)


COMMANDS = {
    family.command: (train if family is TRAIN else command_on_data(family), description(family))
    for family in FAMILIES.values()
}
