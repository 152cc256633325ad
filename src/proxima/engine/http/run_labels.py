"""The servers' names for weights say which run has sent them, and which of two runs came to the servers later.

A label is `RUN.NUMBER.vVERSION`: the run, the number of its publication, the policy version. Two runs that send weights
to one server would train on each other's completions, or take turns without end. They can't talk to each other, but
both read the server's label. A run therefore counts on from the runs whose labels it finds: the first four digits of
its name are greater than theirs. So both find the same one of the two that came later, whatever their clocks say.
"""

import re
import secrets
from collections.abc import Iterable

from proxima.engine.http.dialect import INCOMPLETE

ADAPTED = ".adapters"  # at the end of a run's labels if it sends adapters alone: the server still has its own base
DIGITS = 4  # hexadecimal ones, of the place among the runs
MOST = 0xFFFF  # the last place
LABEL = re.compile(
    rf"(?:{INCOMPLETE})?(?P<run>[0-9a-f]{{8}}|[0-9a-f]{{12}})\.\d+\.v\d+(?P<adapted>{re.escape(ADAPTED)})?(?:-perturbed)?"
)


def new_run(labels: Iterable[str | None]) -> str:
    """The name of a run that begins with servers of these labels: no other run has it, and it is greater than those of
    the runs that the labels name."""
    last = 0
    for label in labels:
        run = run_of(label)
        if run is not None:
            last = max(last, int(_ordered(run)[:DIGITS], 16))
    place = min(last + 1, MOST)
    return f"{place:0{DIGITS}x}{secrets.token_hex(4)}"


def run_of(label: str | None) -> str | None:
    """The run that has sent these weights, whole or in part; None: none of ours, as those that a server starts with."""
    found = LABEL.fullmatch(label or "")
    return None if found is None else found["run"]


def came_before(run: str, other: str) -> bool:
    """True if a run came to the servers before the other one. Of two that came together, both find the same."""
    return _ordered(run) < _ordered(other)


def sends_whole_weights(label: str | None) -> bool:
    """True for the label of a run that does not send adapters alone."""
    found = LABEL.fullmatch(label or "")
    return found is not None and not found["adapted"]


def _ordered(run: str) -> str:
    """Names without a place, which earlier versions gave, are the first."""
    return run.rjust(DIGITS + 8, "0")
