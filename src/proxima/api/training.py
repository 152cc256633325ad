"""A run from Python: `proxima.train`."""

from collections.abc import Sequence
from typing import Any

from proxima.api.python_values import Overrides, expand_user, override_texts, overrides_named, plain
from proxima.api.run_start import resolve_run, train_on_ranks, views_of
from proxima.api.saved import SavedRun, load_run
from proxima.config.resolution import Recipe
from proxima.config.resolved import Resolved
from proxima.runtime.launch.run import train as train_run
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.placement.launcher import places_ranks


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
        recipe: a YAML file, the name of a recipe (`quickstart`), a run folder (its config.yaml), or a mapping of the
            same shape.
        overrides: replaced values, `["train.steps=20", "algorithm=grpo"]` or `{"train.steps": 20}`. In a
            mapping, and in a recipe that is one, a value may be a spec (`Cppo(delta=0.2)`), a class of yours or, for
            `reward`, a function of yours. Classes and functions must be in a module, because a resume and the reward
            workers import them again.
        resume: continue the run in the folder, also after a kill; start it if there is none.
        overwrite: delete the run in the folder and start again.
        accept_changes: also resume with another algorithm, other rewards and the like; log, summary and report record
            it.
        quiet: print nothing; otherwise the lines of the run and, on a terminal, the progress of each stage.

    Returns: the run, read from its folder.

    Raises:
        UserError: an error that the user can fix, as the command line prints with exit code 2; raised before weights
            are loaded if possible.
        RunEnded: the run can't continue.
        KeyboardInterrupt: after Ctrl-C, or the stop button of a notebook. The first one is raised once a checkpoint is
            written, at the end of the step at the latest; `resume` continues from there.
    """
    with overrides_named():
        recipe = plain(expand_user(recipe))
        texts = override_texts(overrides)
        resolved = resolve_run(recipe, texts, resume=resume, overwrite=overwrite, accept_changes=accept_changes)
        if places_ranks(resolved.config):
            begin = {"resume": resume, "overwrite": overwrite, "accept_changes": accept_changes, "quiet": quiet}
            return _on_ray(resolved, recipe, texts, begin)
        with resolved.locating():
            summary = train_run(
                resolved.config,
                resolved=resolved,
                observer=views_of(resolved, quiet=quiet),
                resume=resume,
                overwrite=overwrite,
                accept_changes=accept_changes,
            )
    if summary.status == "stopped":
        raise _stopped(summary.folder, f"after step {summary.steps} with a checkpoint")
    return load_run(summary.folder)


def _stopped(folder: str, where: str) -> KeyboardInterrupt:
    how_to = f"proxima.train({folder!r}, resume=True) continues it, proxima.load_run reads it"
    return KeyboardInterrupt(f"stopped {where}; {how_to}")


def _on_ray(resolved: Resolved[Any], recipe: Recipe, overrides: Sequence[str], begin: dict[str, bool]) -> SavedRun:
    """Train on the ranks of the placement."""
    code, folder = train_on_ranks(resolved, recipe, overrides, begin)
    if code == 130:
        raise _stopped(str(folder), "by Ctrl-C")
    if code != 0:
        raise RunEnded(f"the ranks ended with exit code {code}; see their lines above, and log.txt in {folder}")
    return load_run(folder)
