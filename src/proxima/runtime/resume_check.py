"""What may not change between a run and its resume: anything that would make the resumed run another run."""

from typing import TYPE_CHECKING

from proxima.config.comparable import ABSENT, Purpose, compared, differences, flat_values
from proxima.data import FieldError
from proxima.runtime.journal import Journal

if TYPE_CHECKING:
    from proxima.config.schema import RunConfig


def check_resume(journal: Journal, config: "RunConfig") -> None:
    """Record the config in a new journal; refuse a resume whose config differs in a field that may not.

    Raises:
        ValueError: names the first field that differs, both values, and the remedy.
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
    """What a resume with another `train.steps` does to a learning rate that falls towards the last step; None: nothing
    to say."""
    begun, now = journal.get("steps"), config.train.steps
    if begun is None:
        journal.set("steps", now)
        return None
    if begun == now or config.train.schedule == "constant":
        return None
    return (
        f"train.steps={now}, and the run was begun with {begun}: the {config.train.schedule} learning rate now "
        f"falls towards step {now}, "
        f"so from here on it is another than in a run of {now} steps from the beginning; train.schedule=constant "
        "has no such seam"
    )
