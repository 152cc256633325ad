"""A prompt between its admission and its step, and how long the engine was idle."""

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
        group: once it is scored.
        reason: why a selection rejects the group.
    """

    prompt: Prompt
    stage: Literal["queued", "generating", "scoring", "unjudged", "accepted", "rejected"] = "queued"
    received: dict[int, Completion] = field(default_factory=dict)
    group: Group | None = None
    reason: str = ""

    @classmethod
    def restored(cls, group: Group, pending: Pending) -> "Admitted":
        """Restore the entry as it was when `pending` was taken."""
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
        """The group; only after it is scored."""
        assert self.group is not None
        return self.group


class IdleTime:
    """The seconds in which something was idle.

    Args:
        now: seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self._sum = now, 0.0
        self._since: float | None = None

    def update(self, idle: bool) -> None:
        """Set whether it is idle from now on."""
        self._sum, self._since = self.seconds, self.now() if idle else None

    @property
    def seconds(self) -> float:
        """The idle seconds so far."""
        return self._sum + (0.0 if self._since is None else self.now() - self._since)
