"""Train a model from a recipe. Everything that the run writes is in its folder, which is printed first."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from proxima.cli.output import add_overrides, add_recipe

if TYPE_CHECKING:
    from proxima.runtime.state.summary import Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    replay = "train on the stored rollouts of this run, without generating: rollouts=RUN"
    parser.add_argument("--rollouts", metavar="RUN", help=replay)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that trains."""
    add_recipe(parser)
    add_overrides(parser)
    resume = f"resume the run in the folder: {parser.prog} runs/mine --resume"
    parser.add_argument("--resume", action="store_true", help=resume)
    accept = "with --resume: also with another algorithm, other rewards and the like; the run says so from then on"
    parser.add_argument("--accept-changes", action="store_true", help=accept)
    parser.add_argument("--overwrite", action="store_true", help="delete the run in the folder and start again")
    parser.add_argument("--quiet", action="store_true", help="print only the outcome")


def run(arguments: argparse.Namespace) -> int:
    if arguments.rollouts is not None:
        arguments.override = [*arguments.override, f"rollouts={json.dumps(arguments.rollouts)}"]
    return run_command(arguments)


def run_command(arguments: argparse.Namespace) -> int:
    """Train the recipe that the arguments name, whose config must be of the class of the command."""
    from proxima.api.training import config_notes, resolve_run
    from proxima.config.families import FAMILIES

    how = {name: getattr(arguments, name) for name in ("resume", "overwrite", "accept_changes")}
    resolved = resolve_run(arguments.recipe, arguments.override, root=FAMILIES[arguments.command].root, **how)

    from proxima.view import RunViews

    views = RunViews(None if arguments.quiet else sys.stdout, config_notes(resolved), resolved.config.monitor)
    views.progress("load", 0, 1, "models")  # before the libraries are imported, which takes seconds
    from proxima.runtime.launch.run import train
    from proxima.runtime.loop.training_loop import RunEnded

    try:
        with resolved.locating():
            summary = train(resolved.config, resolved=resolved, observer=views, **how)
    except RunEnded as end:  # the run failed as designed, which is no bug
        print(f"error: {end}", file=sys.stderr)
        return exit_code("failed")
    finally:
        arguments.run_folder = views.run_folder
    if arguments.quiet:
        print(outcome(summary))
    return exit_code(summary.status)


def outcome(summary: "Summary") -> str:
    """`done  40 steps in 195 s  accuracy 0.125 → 0.940  runs/add-7f3c`."""
    known = [record for record in summary.eval.values() if record["value"] is not None]
    values = " → ".join(f"{record['value']:.3f}" for record in known)
    figure = f"  {known[0]['metric']} {values}" if known else ""
    return f"{summary.status}  {summary.steps} steps in {summary.seconds:.0f} s{figure}  {summary.folder}"


def exit_code(status: str) -> int:
    """0 for a finished run, 130 after Ctrl-C, 1 for a failed run."""
    return {"done": 0, "stopped": 130}.get(status, 1)
