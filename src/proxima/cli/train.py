"""Train a model from a recipe. Everything that the run writes is in its folder, which is printed first."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.cli.output import add_overrides
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.runtime.summary import Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file, or a run folder (its config.yaml)")
    add_overrides(parser)
    replay = "train on the stored rollouts of this run, without generating: rollouts=RUN"
    parser.add_argument("--rollouts", metavar="RUN", help=replay)
    resume = "resume the run in the folder: proxima train runs/mine --resume"
    parser.add_argument("--resume", action="store_true", help=resume)
    parser.add_argument("--overwrite", action="store_true", help="delete the run in the folder and start again")
    parser.add_argument("--quiet", action="store_true", help="print only the outcome")


def run(arguments: argparse.Namespace) -> int:
    from proxima.config import load_recipe
    from proxima.config.validate import warnings

    if arguments.resume and arguments.overwrite:
        reason = "--resume and --overwrite exclude each other: one resumes the run, the other deletes it"
        raise UserError(reason, remedy="keep one")
    resolved = load_recipe(arguments.recipe, [*arguments.override, *_replay(arguments), *_run_to_resume(arguments)])
    if arguments.resume and not resolved.config.folder:
        raise UserError("--resume: which run? Its folder was printed when it started: proxima train runs/NAME --resume")

    from proxima.runtime.controller import RunEnded
    from proxima.runtime.observer import Tee
    from proxima.runtime.run import train
    from proxima.view import StartupNotes, observer_for

    watcher = observer_for(None if arguments.quiet else sys.stdout)
    notes = StartupNotes(watcher, [str(problem) for problem in warnings(resolved)])
    how = {"resume": arguments.resume, "overwrite": arguments.overwrite}
    try:
        with resolved.locating():
            summary = train(resolved.config, resolved=resolved, observer=Tee(watcher, notes), **how)
    except RunEnded as end:  # the run failed as designed, which is no bug
        print(f"error: {end}", file=sys.stderr)
        return exit_code("failed")
    finally:
        arguments.run_folder = notes.run_folder
    if arguments.quiet:
        print(outcome(summary))
    return exit_code(summary.status)


def _replay(arguments: argparse.Namespace) -> list[str]:
    return [f"rollouts={json.dumps(arguments.rollouts)}"] if arguments.rollouts is not None else []


def _run_to_resume(arguments: argparse.Namespace) -> list[str]:
    """`folder=…` where `--resume` is given a run folder in place of a recipe: its config may name no folder, or the one
    that it was moved from."""
    place = Path(arguments.recipe)
    run = place.parent if place.name == "config.yaml" else place
    named = any(word.startswith("folder=") for word in arguments.override)
    found = arguments.resume and not named and (run / "run.sqlite").is_file()
    return [f"folder={json.dumps(str(run))}"] if found else []


def outcome(summary: "Summary") -> str:
    """`done  40 steps in 195 s  accuracy 0.125 → 0.940  runs/add-7f3c`."""
    known = [f"{record['accuracy']:.3f}" for record in summary.eval.values() if record.get("accuracy") is not None]
    accuracy = f"  accuracy {' → '.join(known)}" if known else ""
    return f"{summary.status}  {summary.steps} steps in {summary.seconds:.0f} s{accuracy}  {summary.folder}"


def exit_code(status: str) -> int:
    """0 for a finished run, 130 after Ctrl-C, 1 for a failed run."""
    return {"done": 0, "stopped": 130}.get(status, 1)
