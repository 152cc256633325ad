"""A prompt between its admission and its step."""

from dataclasses import dataclass, field
from typing import Literal

from proxima.data.flow import Completion, Group, Prompt
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
