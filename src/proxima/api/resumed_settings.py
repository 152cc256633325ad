"""Check that a resume has the settings of the run that it resumes."""

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from proxima.config.comparable import ABSENT, Purpose, differences, flat_values, may_differ
from proxima.config.families import TRAIN, family_of_config
from proxima.config.resolution import resolve
from proxima.config.resolved import Resolved
from proxima.config.scalars import in_one_line
from proxima.data import UserError


def _written_now(path: str, was: Any, sources: Mapping[str, str], changed: Collection[str]) -> bool:
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


def refuse_dropped_settings(resolved: Resolved[Any]) -> None:
    """Refuse to resume by the recipe a run whose earlier command lines set more: it would continue without those
    settings. Fields that may not differ at all are compared when the run is opened."""
    folder = Path(str(resolved.config.folder)).expanduser()
    if not (folder / "config.yaml").is_file():
        return
    before = resolve(folder, root=None)
    own_settings = f"resume it with its own settings, proxima train {shlex.quote(str(folder))} --resume"
    if (was := family_of_config(before.config)) is not (now := family_of_config(resolved.config)):
        kinds = ["RL" if family in (None, TRAIN) else family.name for family in (was, now)]
        raise UserError(
            f"the run in {folder} is {kinds[0]}, the recipe {kinds[1]}", remedy=f"{own_settings}, or set another folder"
        )
    sources = {entry.path: entry.where for entry in resolved.entries}
    changes = list(differences(flat_values(before.config), flat_values(resolved.config), Purpose.RERUN))
    changed = {path for path, _, _ in changes}
    dropped = [
        f"{path}={'absent' if was is ABSENT else in_one_line(was)} (now {in_one_line(resolved.entry(path).value)})"
        for path, was, now in changes
        if now is not ABSENT and may_differ(path, Purpose.RESUME) and not _written_now(path, was, sources, changed)
    ]
    if dropped:
        remedy = f"{own_settings}, or write what is to change as overrides"
        raise UserError(f"the run in {folder} has {', '.join(dropped)}", remedy=remedy)
