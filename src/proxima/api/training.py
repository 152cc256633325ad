"""`proxima.train`, and a function for each way to train on a fixed data set: a run from Python."""

import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from proxima.api.python_values import Overrides, expand_user, override_texts, overrides_named, plain
from proxima.config import Resolved, RunConfig, load_recipe, resolve
from proxima.config.comparable import ABSENT, Purpose, differences, flat_values, may_differ
from proxima.config.families import OFFLINE, TRAIN, Family, command_of, family_of_config
from proxima.config.resolution import Recipe
from proxima.config.scalars import in_one_line
from proxima.config.validate import warnings
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.api.saved import SavedRun


def train(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_changes: bool = False,
    quiet: bool = False,
) -> "SavedRun":
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
        quiet: print nothing; otherwise lines, or the live view where standard output is a terminal.

    Raises:
        UserError: what the command line prints with exit code 2; before weights are loaded wherever possible.
        RunEnded: the run can't continue.
        KeyboardInterrupt: after Ctrl-C, or the stop button of a notebook. The first one writes a checkpoint before,
            which takes up to the end of the step; `resume` continues from there.
    """
    return _run(recipe, overrides, RunConfig, resume, overwrite, accept_changes, quiet)


class Train(Protocol):
    """The function of a family: the arguments of `train`."""

    def __call__(
        self,
        recipe: Recipe,
        overrides: Overrides = (),
        *,
        resume: bool = False,
        overwrite: bool = False,
        accept_changes: bool = False,
        quiet: bool = False,
    ) -> "SavedRun": ...


def _offline_function(family: Family) -> Train:
    def train_offline(
        recipe: Recipe,
        overrides: Overrides = (),
        *,
        resume: bool = False,
        overwrite: bool = False,
        accept_changes: bool = False,
        quiet: bool = False,
    ) -> "SavedRun":
        return _run(recipe, overrides, family.root, resume, overwrite, accept_changes, quiet)

    train_offline.__name__ = train_offline.__qualname__ = family.function
    title = f"{family.title[0].upper()}{family.title[1:]}"
    train_offline.__doc__ = f"{title}, as `proxima {family.command}` does, and return the run; see `train`."
    return train_offline


OFFLINE_FUNCTIONS: Mapping[str, Train] = {family.function: _offline_function(family) for family in OFFLINE}


def __getattr__(name: str) -> Train:
    """`sft`, `reward_model`, `dpo`: the function of every line of `OFFLINE`."""
    if name not in OFFLINE_FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return OFFLINE_FUNCTIONS[name]


def _run(
    recipe: Recipe, overrides: Overrides, root: type, resume: bool, overwrite: bool, accept_changes: bool, quiet: bool
) -> "SavedRun":
    from proxima.api.saved import load_run
    from proxima.runtime.launch.run import train as train_run
    from proxima.view.run_views import RunViews

    with overrides_named():
        resolved = resolve_run(
            plain(expand_user(recipe)),
            override_texts(overrides),
            root=root,
            resume=resume,
            overwrite=overwrite,
            accept_changes=accept_changes,
        )
        views = RunViews(None if quiet else sys.stdout, config_notes(resolved), resolved.config.monitor)
        with resolved.locating():
            summary = train_run(
                resolved.config,
                resolved=resolved,
                resume=resume,
                overwrite=overwrite,
                accept_changes=accept_changes,
                observer=views,
            )
    if summary.status == "stopped":
        function = (family_of_config(resolved.config) or TRAIN).function
        how_to = f"proxima.{function}({summary.folder!r}, resume=True) continues it, proxima.load_run reads it"
        raise KeyboardInterrupt(f"stopped after step {summary.steps} with a checkpoint; {how_to}")
    return load_run(summary.folder)


def resolve_run(
    recipe: Recipe,
    overrides: Sequence[str],
    *,
    root: type = RunConfig,
    resume: bool = False,
    overwrite: bool = False,
    accept_changes: bool = False,
) -> Resolved[Any]:
    """The checked config of a run, of the class of its command; for a resume, of the run in the folder that is given in
    place of a recipe."""
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
        if place.is_dir() or any((run / name).is_file() for name in ("run.sqlite", "metrics.jsonl")):
            overrides = [*overrides, f"folder={json.dumps(str(run))}"]
    resolved: Resolved[Any] = load_recipe(recipe, overrides, root=root)
    if resume and not resolved.config.folder:
        how = f"proxima {command_of(root)} runs/NAME --resume"
        raise UserError(f"--resume: which run? Its folder was printed when it started: {how}")
    if resume:
        _refuse_dropped_settings(resolved)
    return resolved


def _written_now(path: str, sources: Mapping[str, str], changed: Collection[str]) -> bool:
    """Whether this command line sets the field, or gives the spec that it belongs to another kind.

    Args:
        sources: where each field was set.
        changed: the fields that differ.
    """
    kind = f"{path.rpartition('.')[0]}.kind"
    return any("command line" in sources.get(name, "") for name in {path, kind} & {path, *changed})


def _refuse_dropped_settings(resolved: Resolved[Any]) -> None:
    """Refuse to resume by the recipe a run whose earlier command lines set more: it would continue without those
    settings. Fields that may not differ at all are compared when the run is opened."""
    folder = Path(str(resolved.config.folder)).expanduser()
    if not (folder / "config.yaml").is_file():
        return
    before = resolve(folder, root=type(resolved.config))
    sources = {entry.path: entry.where for entry in resolved.entries}
    changes = list(differences(flat_values(before.config), flat_values(resolved.config), Purpose.RERUN))
    changed = {path for path, _, _ in changes}
    dropped = [
        f"{path}={'absent' if was is ABSENT else in_one_line(was)} (now {in_one_line(resolved.entry(path).value)})"
        for path, was, now in changes
        if now is not ABSENT and may_differ(path, Purpose.RESUME) and not _written_now(path, sources, changed)
    ]
    if dropped:
        command = command_of(resolved.config)
        own = f"resume it with its own settings, proxima {command} {shlex.quote(str(folder))} --resume"
        remedy = f"{own}, or write what is to change as overrides"
        raise UserError(f"the run in {folder} has {', '.join(dropped)}", remedy=remedy)


def config_notes(resolved: Resolved[Any]) -> list[str]:
    """What the config's checks warn of."""
    return [str(problem) for problem in warnings(resolved)]
