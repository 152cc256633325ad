"""The date that a run's chat template reads: that of its start, kept in config.yaml for every resume."""

from dataclasses import replace
from typing import Any

from proxima.config.recipe_reader import read_yaml
from proxima.config.resolved import Resolved
from proxima.runtime.state.folder import RunFolder

FIELD = "data.template_date"
STARTED = "the day on which the run was started"


def with_date(config: Any, resolved: Resolved[Any] | None, date: str) -> tuple[Any, Resolved[Any] | None]:
    """The config, and the same with provenance, with this date for the chat template."""
    config = replace(config, data=replace(config.data, template_date=date))
    if resolved is None:
        return config, None
    entries = tuple(
        replace(entry, value=date, source=STARTED, where=STARTED, origin="file", is_default=False)
        if entry.path == FIELD
        else entry
        for entry in resolved.entries
    )
    return config, replace(resolved, config=config, entries=entries)


def date_of_run(folder: RunFolder) -> str | None:
    """The date of the run in a folder; None if it has none, or there is no run."""
    if not folder.config.is_file():
        return None

    data: Any = read_yaml(folder.config).to_python()
    date = (data.get("data") or {}).get("template_date")
    return None if date is None else str(date)
