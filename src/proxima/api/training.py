"""A run from Python: `proxima.train`."""

from proxima.api.python_values import Overrides, expand_user, override_texts, overrides_named, plain
from proxima.api.run_start import resolve_run, train_here, train_on_ranks, views_of
from proxima.api.saved import SavedRun, load_run
from proxima.config.resolution import Recipe
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
            code, folder = train_on_ranks(
                resolved, recipe, texts, resume=resume, overwrite=overwrite, accept_changes=accept_changes, quiet=quiet
            )
            return _run_of_ranks(code, str(folder))
        views = views_of(resolved, quiet=quiet)
        summary = train_here(resolved, views, resume=resume, overwrite=overwrite, accept_changes=accept_changes)
    if summary.status == "stopped":
        raise _stopped(summary.folder, f"after step {summary.steps} with a checkpoint")
    return load_run(summary.folder)


def _stopped(folder: str, where: str) -> KeyboardInterrupt:
    how_to = f"proxima.train({folder!r}, resume=True) continues it, proxima.load_run reads it"
    return KeyboardInterrupt(f"stopped {where}; {how_to}")


def _run_of_ranks(code: int, folder: str) -> SavedRun:
    """The run whose ranks have ended with an exit code."""
    if code == 130:
        raise _stopped(folder, "by Ctrl-C")
    if code != 0:
        raise RunEnded(f"the ranks ended with exit code {code}; see their lines above, and log.txt in {folder}")
    return load_run(folder)
