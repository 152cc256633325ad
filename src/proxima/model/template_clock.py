"""The clock that chat templates read, `strftime_now`: within `fixed_clock`, it stands still for the whole process.

transformers gives templates the clock of the machine, so that the prompts of a run would change at midnight, and those
of a resume on another day would not be those of the run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from types import SimpleNamespace
from typing import Any

from proxima.data import FieldError

NAME = "strftime_now"  # of the function in a template


@dataclass(eq=False)
class TemplateClock:
    """A clock that stands still.

    Args:
        date: its moment: a date, or date and time, as in ISO 8601.
        named: a template that names the clock has been rendered.
        read: a template has read it.
    """

    date: str
    named: bool = False
    read: bool = False

    def now(self) -> datetime:
        """The moment of the clock, in the place of `datetime.now`."""
        self.read = True
        return datetime.fromisoformat(self.date)


_clocks: list[TemplateClock] = []  # entered and not yet left, the innermost last


def current_clock() -> TemplateClock | None:
    """The clock of the innermost `fixed_clock`; None outside."""
    return _clocks[-1] if _clocks else None


@contextmanager
def fixed_clock(moment: str | None) -> Iterator[TemplateClock]:
    """Let templates read this moment (see `TemplateClock`) until the end of the block; None: the beginning of today."""
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    clock, machine = TemplateClock(moment or date.today().isoformat()), module.datetime
    module.datetime = SimpleNamespace(now=clock.now)
    _clocks.append(clock)
    try:
        yield clock
    finally:
        _clocks.remove(clock)
        module.datetime = machine


def require_moment(moment: str | None) -> None:
    """Raise FieldError unless the text is a date, or date and time."""
    try:
        datetime.fromisoformat(moment or "2000-01-01")
    except ValueError:
        reason = "must be a date, or date and time, of ISO 8601"
        raise FieldError("template_date", moment, reason, remedy="write 2024-07-26, or 2024-07-26T18:30") from None


def clock_notes(clock: TemplateClock | None, given: str | None) -> list[str]:
    """A warning if templates read the clock and no date was given, or if one was given in vain."""
    if clock is None:
        return []
    if clock.read and given is None:
        what = f"the chat template reads the clock and writes the date into prompts, here {clock.date}"
        return [f"{what}; data.template_date sets it, and a run keeps that of its start, also when it is resumed"]
    if given is not None and not clock.named:
        return [f"data.template_date={given} has no effect: the chat template reads no clock"]
    return []
