"""A resume: what would make it another run is refused, and everything is restored as it was at the last checkpoint."""

from typing import Any, TypedDict

from proxima.config.comparable import ABSENT, Purpose, compared, differences, flat_values, may_differ
from proxima.config.scalars import in_one_line
from proxima.data import FieldErrors
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.refused_resume import refusals


class Change(TypedDict):
    """A field or an input that has changed since the run was started, as the journal keeps it."""

    field: str
    before: Any
    now: Any


def check_resume(journal: Journal, config: Any, *, accept: bool = False) -> list[Change]:
    """Record the config in a new journal; refuse a resume whose config differs in fields that may not. With `accept`,
    the user accepts differences where a checkpoint fits the other value.

    Returns: the accepted differences, for `record_changes`.

    Raises:
        FieldErrors: names each field that differs, both values, and the remedy.
    """
    now = compared(flat_values(config), Purpose.RESUME)
    before = journal.get("config")
    if before is None:
        journal.set("config", now)
        return []
    differing = list(differences(before, now, Purpose.RESUME))
    refused = [field for field in differing if not (accept and may_differ(field[0], Purpose.CHANGE))]
    if refused:
        raise FieldErrors(*refusals(journal, refused))
    changed = [(path, [None if value is ABSENT else value for value in values]) for path, *values in differing]
    return [Change(field=path, before=was, now=new) for path, (was, new) in changed]


def change_notes(journal: Journal) -> list[str]:
    """A warning for each resume with changes: nobody should take the run for an uninterrupted one."""

    def shown(change: Change) -> str:
        return f"{change['field']}={in_one_line(change['now'])} (was {in_one_line(change['before'])})"

    return [
        f"resumed after step {entry['step']} with other settings: "
        f"{', '.join(map(shown, entry['changes']))}; the steps before were made with the former"
        for entry in journal.get("changes") or ()
    ]


def schedule_note(journal: Journal, schedule: str, now: int) -> str | None:
    """A warning if `now` differs from the number of steps at the start, which changes the learning rate schedule in the
    middle of the run."""
    started = journal.get("steps")
    if started is None:
        journal.set("steps", now)
        return None
    if started == now or schedule == "constant":
        return None
    return (
        f"train.steps={now}, and the run was started with {started}: from here on the {schedule} learning "
        f"rate falls towards step {now}, unlike in a run of {now} steps from the start; train.schedule=constant avoids "
        "the difference"
    )
