"""The errors that refuse a resume with other settings: what differs, why it may not, and what to do."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from proxima.config.comparable import ABSENT, Purpose, differences, flat_values, may_differ
from proxima.config.families import TRAIN, Family, family_of_config
from proxima.config.outcomes import settled_as
from proxima.config.resolution import resolve
from proxima.config.resolved import Resolved
from proxima.config.scalars import in_one_line
from proxima.data import FieldError, UserError
from proxima.runtime.state.journal import Journal

BOUND = {  # why not even a user who accepts it may change a field, by section
    "model": "the checkpoint has the weights of that model",
    "critic": "the checkpoint has the weights of that critic",
    "seed": "the order of the data and all draws come from it",
    "task": "the data cursor counts its rows",
    "data.template_date": "the prompts of its steps show it",
    "data": "the data cursor counts its rows",
    "train.optimizer.kind": "the checkpoint has the state of that optimizer",
    "train.completions_per_prompt": "the groups that wait in the checkpoint have that many",
    "runtime": "the prompts in flight and the groups in the checkpoint were admitted under it",
    "": "a checkpoint may not fit another value",
}


def refusals(journal: Journal, differing: Sequence[tuple[str, Any, Any]]) -> list[FieldError]:
    """The errors for the fields that differ: path, value before, value now. Another algorithm is one error."""
    loss = [field for field in differing if field[0].startswith("algorithm.")]
    other = [field for field in differing if field not in loss]
    errors = list[FieldError]()
    if any(path == "algorithm.surrogate.kind" for path, *_ in loss):
        errors.append(_other_algorithm(journal, loss))
    else:
        other = list(differing)
    errors += [_refusal(journal, *field) for field in other]
    for error, following in pairwise(errors):
        if error.remedy == following.remedy:  # said once, by the last of them
            error.remedy = ""
    return errors


def _other_algorithm(journal: Journal, differing: Sequence[tuple[str, Any, Any]]) -> FieldError:
    (path, was, now) = next(field for field in differing if field[0] == "algorithm.surrogate.kind")
    names = [name.removeprefix("algorithm.") for name, *_ in differing if name != path]
    others = ""
    if names:
        shown = ", ".join(names[:3])
        if len(names) > 3:
            shown = f"{shown}, …"
        others = f", and {len(names)} more fields differ ({shown})"
    run = f"with which the run in {journal.path.parent} was started"
    reason = f"differs from {was!r}, {run}: it is another algorithm{others}"
    return FieldError(path, None if now is ABSENT else now, reason, remedy=_remedy(path))


def _refusal(journal: Journal, path: str, was: object, wanted: object) -> FieldError:
    shown = "a config without it" if was is ABSENT else repr(was)
    reason = f"differs from {shown}, with which the run in {journal.path.parent} was started"
    if not may_differ(path, Purpose.CHANGE):
        reason += f", and {_bound(path)}"
    return FieldError(path, None if wanted is ABSENT else wanted, reason, remedy=_remedy(path))


def _bound(path: str) -> str:
    """Why not even a user who accepts it may change this field."""
    for section, reason in BOUND.items():
        if path == section or path.startswith(f"{section}."):
            return reason
    return BOUND[""]


def _remedy(path: str) -> str:
    other = "resume with that value, or start another run with folder=PATH"
    if may_differ(path, Purpose.CHANGE):
        other += "; --accept-changes resumes anyway, and says so in log, summary and report"
    return other


def refuse_dropped_settings(resolved: Resolved[Any]) -> None:
    """Refuse to resume by the recipe a run whose earlier command lines set more: it would continue without those
    settings. Fields that may not differ at all are compared when the run is opened."""
    folder = Path(str(resolved.config.folder)).expanduser()
    if not (folder / "config.yaml").is_file():
        return
    before = resolve(folder, root=None)
    own_settings = f"resume it with its own settings, proxima train {shlex.quote(str(folder))} --resume"
    was = family_of_config(before.config)
    now = family_of_config(resolved.config)
    if was is not now:
        reason = f"the run in {folder} is {_family_name(was)}, the recipe {_family_name(now)}"
        raise UserError(reason, remedy=f"{own_settings}, or set another folder")
    dropped = _dropped_settings(before, resolved)
    if dropped:
        remedy = f"{own_settings}, or write what is to change as overrides"
        raise UserError(f"the run in {folder} has {', '.join(dropped)}", remedy=remedy)


def _family_name(family: Family | None) -> str:
    return "RL" if family in (None, TRAIN) else family.name


def _dropped_settings(before: Resolved[Any], resolved: Resolved[Any]) -> list[str]:
    """The settings of the run that a resume by the recipe would drop, with the values that they would have."""
    sources = {entry.path: entry.where for entry in resolved.entries}
    config = settled_as(resolved.config, before.config)
    changes = list(differences(flat_values(before.config), flat_values(config), Purpose.RERUN))
    changed = {path for path, _, _ in changes}
    dropped = []
    for path, was, now in changes:
        if now is ABSENT or not may_differ(path, Purpose.RESUME) or _written_now(path, was, sources, changed):
            continue
        shown = "absent" if was is ABSENT else in_one_line(was)
        dropped.append(f"{path}={shown} (now {in_one_line(resolved.entry(path).value)})")
    return dropped


def _written_now(path: str, was: object, sources: Mapping[str, str], changed: Collection[str]) -> bool:
    """True if this command line sets the field, or changes the kind of the spec that it belongs to.

    Args:
        was: its value before; `ABSENT` where a spec around it was of another kind, which has no such field.
        sources: where each field was set.
        changed: the fields that differ.
    """
    parts = path.split(".")
    names = {path, ".".join([*parts[:-1], "kind"])} & {path, *changed}
    if was is ABSENT:
        names |= {".".join([*parts[:end], "kind"]) for end in range(1, len(parts))}
    return any("command line" in sources.get(name, "") for name in names)
