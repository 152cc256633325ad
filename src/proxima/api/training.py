"""A run from Python, `proxima.train`, and from the command line."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxima.api.python_values import Overrides, expand_user, override_texts, overrides_named, plain
from proxima.api.saved import SavedRun, load_run
from proxima.config.families import family_name
from proxima.config.resolution import Recipe, resolve
from proxima.config.resolved import Resolved
from proxima.config.validate import check_with_model, require_sound, warnings
from proxima.data import UserError
from proxima.runtime.launch.run import train as train_run
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.placement.launcher import check_before_imports, is_first, places_ranks
from proxima.runtime.placement.ray_supervisor import train_on_ray
from proxima.runtime.resume.refuse import refuse_dropped_settings
from proxima.runtime.state.folder import RunFolder, existing_run
from proxima.runtime.state.summary import Summary
from proxima.system.user_files import find_recipe
from proxima.view.eval_tables import pair_rows
from proxima.view.run_views import RunViews
from proxima.view.terminal import table_text


def train(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_changes: bool = False,
    quiet: bool = False,
) -> SavedRun:
    """Train a model, as `proxima train` does, and return the run.

    Args:
        recipe: a YAML file, a run folder (its config.yaml), or a mapping of the same shape.
        overrides: values over the recipe's, `["train.steps=20", "algorithm=grpo"]` or `{"train.steps": 20}`. In a
            mapping, and in a recipe that is one, a value may be a spec (`Cppo(delta=0.2)`), a class of yours or, for
            `reward`, a function of yours; they must be in a module, because a resume and the worker processes of
            rewards import them again.
        resume: continue the run in the folder, also after a kill; starts it if there is none.
        overwrite: delete the run in the folder and start again.
        accept_changes: resume also with another algorithm, other rewards and the like; log, summary and report say so.
        quiet: print nothing; otherwise lines, and the progress of a stage where standard output is a terminal.

    Raises:
        UserError: what the command line prints with exit code 2; before weights are loaded wherever possible.
        RunEnded: the run can't continue.
        KeyboardInterrupt: after Ctrl-C, or the stop button of a notebook. The first one writes a checkpoint before,
            which takes up to the end of the step; `resume` continues from there.
    """
    with overrides_named():
        recipe, texts = plain(expand_user(recipe)), override_texts(overrides)
        resolved = resolve_run(recipe, texts, resume=resume, overwrite=overwrite, accept_changes=accept_changes)
        if places_ranks(resolved.config):
            begin = {"resume": resume, "overwrite": overwrite, "accept_changes": accept_changes, "quiet": quiet}
            return _on_ray(resolved, recipe, texts, begin)
        with resolved.locating():
            summary = train_run(
                resolved.config,
                resolved=resolved,
                observer=_views(resolved, quiet=quiet),
                resume=resume,
                overwrite=overwrite,
                accept_changes=accept_changes,
            )
    if summary.status == "stopped":
        raise _stopped(summary.folder, f"after step {summary.steps} with a checkpoint")
    return load_run(summary.folder)


def _views(resolved: Resolved[Any], *, quiet: bool) -> RunViews:
    """What shows a run: lines, trackers, the viewer."""
    notes = [str(problem) for problem in warnings(resolved)]
    return RunViews(None if quiet else sys.stdout, notes, resolved.config.monitor, resolved.config.view)


def _stopped(folder: str, where: str) -> KeyboardInterrupt:
    how_to = f"proxima.train({folder!r}, resume=True) continues it, proxima.load_run reads it"
    return KeyboardInterrupt(f"stopped {where}; {how_to}")


def _on_ray(resolved: Resolved[Any], recipe: Recipe, overrides: Sequence[str], begin: dict[str, bool]) -> SavedRun:
    """The run on the ranks of its placement."""
    code, folder = train_on_ray(resolved, recipe, overrides, begin)
    if code == 130:
        raise _stopped(str(folder), "by Ctrl-C")
    if code != 0:
        raise RunEnded(f"the ranks ended with exit code {code}; see their lines above, and log.txt in {folder}")
    return load_run(folder)


def resolve_run(
    recipe: Recipe,
    overrides: Sequence[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_changes: bool = False,
) -> Resolved[Any]:
    """The checked config of a run, of the class of its recipe; its models are proven by the run. To resume, the run's
    folder is given in place of a recipe."""
    if resume and overwrite:
        reason = "--resume and --overwrite exclude each other: one resumes the run, the other deletes it"
        raise UserError(reason, remedy="keep one")
    if accept_changes and not resume:
        raise UserError("--accept-changes is for a resume", remedy="add --resume, or leave it out")
    named = any(word.startswith("folder=") for word in overrides)
    if resume and not named and not isinstance(recipe, Mapping):
        # Its config may name no folder, or the one that it was moved from.
        place = Path(recipe)
        run = place.parent if place.name == "config.yaml" else place
        begun = any((run / name).is_file() for name in ("run.sqlite", "metrics.jsonl"))
        if begun or place.is_dir() or not find_recipe(recipe).is_file():
            overrides = [*overrides, f"folder={json.dumps(str(existing_run(run).path))}"]
    resolved: Resolved[Any] = resolve(recipe, overrides, root=None)
    require_sound(resolved, proven=False)
    if resume and not resolved.config.folder:
        raise UserError("--resume: which run? Its folder was printed when it started: proxima train runs/NAME --resume")
    if resume:
        refuse_dropped_settings(resolved)
    if not places_ranks(resolved.config):
        with resolved.locating():
            check_before_imports(resolved, resume=resume, overwrite=overwrite)
    check_with_model(resolved, proven=False)  # last: it may be downloaded
    return resolved


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
        begin = {"resume": resume, "overwrite": overwrite, "accept_changes": accept_changes, "quiet": quiet}
        return train_on_ray(resolved, recipe, overrides, begin)[0]
    views = _views(resolved, quiet=quiet)
    views.progress("check", 0, 1, "recipes")
    try:
        with resolved.locating():
            summary = train_run(
                config,
                resolved=resolved,
                observer=views,
                resume=resume,
                overwrite=overwrite,
                accept_changes=accept_changes,
            )
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
    records = [record for record in RunFolder(folder).read_metrics() if record["kind"] == "eval"]
    if records:
        print(table_text(pair_rows(records[-1]), sys.stdout))


def note_new_run(folder: Path) -> None:
    """Say that `--resume` finds no run in the folder and starts one: its name may be a typo."""
    if not RunFolder(folder).has_run:
        print(f"note: {folder} contains no run to resume: a new run starts there", file=sys.stderr)


def outcome(summary: Summary) -> str:
    """`done  40 steps in 195 s  accuracy 0.125 → 0.940  runs/add-7f3c`."""
    measured = [record for record in summary.eval.values() if record["value"] is not None]
    values = " → ".join(f"{record['value']:.3f}" for record in measured)
    figure = f"  {measured[0]['metric']} {values}" if measured else ""
    return f"{summary.status}  {summary.steps} steps in {summary.seconds:.0f} s{figure}  {summary.folder}"
