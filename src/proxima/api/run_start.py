"""Starts a run from Python or the command line: resolves and checks its config, creates its views, and trains."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxima.config.resolution import Recipe, resolve
from proxima.config.resolved import Resolved
from proxima.config.validate import fetch_demo_model, require_sound, warnings
from proxima.data import UserError
from proxima.runtime.launch.run import train
from proxima.runtime.placement.launcher import check_before_imports, places_ranks
from proxima.runtime.resume.refuse import refuse_dropped_settings
from proxima.runtime.state.folder import existing_run
from proxima.runtime.state.summary import Summary
from proxima.system.user_files import find_recipe
from proxima.view.run_views import RunViews


def resolve_run(
    recipe: Recipe,
    overrides: Sequence[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_changes: bool = False,
) -> Resolved[Any]:
    """Resolve and check the config of a run, of the class that its recipe needs; the run itself tests the models'
    computation. To resume, pass the run's folder in place of a recipe.

    Raises:
        UserError: the config is invalid or the flags contradict one another; to resume, no run was found.
    """
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
    require_sound(resolved)
    if resume and not resolved.config.folder:
        raise UserError("--resume: which run? Its folder was printed when it started: proxima train runs/NAME --resume")
    if resume:
        refuse_dropped_settings(resolved)
    if not places_ranks(resolved.config):
        with resolved.locating():
            check_before_imports(resolved, resume=resume, overwrite=overwrite)
    if fetch_demo_model(resolved.get("model.path")):  # last: it may be downloaded
        require_sound(resolved)
    return resolved


def views_of(resolved: Resolved[Any], *, quiet: bool) -> RunViews:
    """The views of a run: log lines, trackers, the viewer."""
    notes = [str(problem) for problem in warnings(resolved)]
    stream = None if quiet else sys.stdout
    return RunViews(stream, notes, resolved.config.monitor, resolved.config.view)


def train_here(
    resolved: Resolved[Any], views: RunViews, *, resume: bool, overwrite: bool, accept_changes: bool
) -> Summary:
    """Train in this process, alone or as one rank of several; the views show how it goes."""
    with resolved.locating():
        return train(
            resolved.config,
            resolved=resolved,
            observer=views,
            resume=resume,
            overwrite=overwrite,
            accept_changes=accept_changes,
        )


def train_on_ranks(
    resolved: Resolved[Any],
    recipe: Recipe,
    overrides: Sequence[str],
    *,
    resume: bool,
    overwrite: bool,
    accept_changes: bool,
    quiet: bool,
) -> tuple[int, Path]:
    """Train on the ranks that the placement starts on a Ray cluster. Returns the exit code and the run's folder."""
    from proxima.runtime.placement.ray_supervisor import train_on_ray

    begin = {"resume": resume, "overwrite": overwrite, "accept_changes": accept_changes, "quiet": quiet}
    return train_on_ray(resolved, recipe, overrides, begin)
