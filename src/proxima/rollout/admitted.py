"""A prompt between its admission and its step, and the idle time of the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from proxima.data import Completion, Group, Prompt
from proxima.rollout.collector import Pending


@dataclass(eq=False)
class Admitted:
    """A prompt between admission and its step.

    Args:
        stage: `queued`: the engine has no place for it yet, after a resume.
        received: its completions so far, by sample.
        group: the scored group; None before scoring.
        reason: why a selection rejects the group; empty if it doesn't.
    """

    prompt: Prompt
    stage: Literal["queued", "generating", "scoring", "unjudged", "accepted", "rejected"] = "queued"
    received: dict[int, Completion] = field(default_factory=dict)
    group: Group | None = None
    reason: str = ""

    @classmethod
    def restored(cls, group: Group, pending: Pending) -> "Admitted":
        """Restore the entry of a group as it was when `pending` was taken."""
        entry = cls(group.prompt, "accepted", group=group, reason=pending.rejected.get(group.prompt.uid, ""))
        if entry.uid in pending.rejected:
            entry.stage = "rejected"
        elif entry.uid in pending.unjudged:
            entry.stage = "unjudged"
        return entry

    @property
    def uid(self) -> int:
        """The uid of the prompt."""
        return self.prompt.uid

    @property
    def scored(self) -> Group:
        """The group; available only after scoring."""
        assert self.group is not None
        return self.group


class IdleTime:
    """The seconds in which something kept the engine idle, since the first `update`.

    Args:
        now: a clock, in seconds.
        causes: those that hold at the beginning.
    """

    def __init__(self, now: Callable[[], float], *causes: str) -> None:
        self.now, self._sum, self._causes = now, 0.0, set(causes)
        self._since: float | None = None

    def update(self, cause: str, holds: bool) -> None:
        """Set whether a cause holds from now on."""
        self._sum = self.seconds
        (self._causes.add if holds else self._causes.discard)(cause)
        self._since = self.now() if self._causes else None

    @property
    def seconds(self) -> float:
        """The idle time so far."""
        return self._sum + (0.0 if self._since is None else self.now() - self._since)
