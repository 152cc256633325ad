"""Refuse a resume whose config would make it another run."""

from typing import TYPE_CHECKING

from proxima.config.comparable import ABSENT, Purpose, compared, differences, flat_values
from proxima.data import FieldError
from proxima.runtime.journal import Journal

if TYPE_CHECKING:
    from proxima.config.schema import RunConfig


def check_resume(journal: Journal, config: "RunConfig") -> None:
    """Record the config in a new journal; refuse a resume whose config differs in a field that may not.

    Raises:
        FieldError: names the first field that differs, both values, and the remedy.
    """
    now = compared(flat_values(config), Purpose.RESUME)
    before = journal.get("config")
    if before is None:
        journal.set("config", now)
        return
    for path, was, wanted in differences(before, now, Purpose.RESUME):
        shown = "a config without it" if was is ABSENT else repr(was)
        reason = f"differs from {shown}, with which the run in {journal.path.parent} was started"
        remedy = "resume with that value, or start another run with folder=PATH"
        raise FieldError(path, None if wanted is ABSENT else wanted, reason, remedy=remedy)


def schedule_note(journal: Journal, config: "RunConfig") -> str | None:
    """A warning if another `train.steps` changes the learning rate schedule in the middle of the run."""
    started, now = journal.get("steps"), config.train.steps
    if started is None:
        journal.set("steps", now)
        return None
    if started == now or config.train.schedule == "constant":
        return None
    return (
        f"train.steps={now}, and the run was started with {started}: from here on the {config.train.schedule} learning "
        f"rate falls towards step {now}, unlike in a run of {now} steps from the start; train.schedule=constant avoids "
        "the difference"
    )
