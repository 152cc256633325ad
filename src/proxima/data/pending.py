"""What outlives a step: groups and prompts held for later ones, and what a group says of its question."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proxima.data.flow import Group, Prompt


@dataclass(frozen=True, kw_only=True)
class Pending:
    """The groups and prompts that a collector holds for later steps at one moment, by uid. A resume needs only these
    and the data cursor of the same moment.

    Args:
        groups: generated, but not yet used or dropped by a step.
        prompts: enqueued, but not yet completely generated.
        rejected: uid → reason, for the groups that a step will drop.
        unjudged: groups whose whole-batch rewards or rejection are still pending.
    """

    groups: tuple[Group, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    rejected: Mapping[int, str] = field(default_factory=dict)
    unjudged: frozenset[int] = frozenset()

    def facts(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint, which stores the groups separately; empty ones are omitted."""
        facts: dict[str, Any] = {"pending": [group.prompt.uid for group in self.groups]}
        more = {
            "in_flight": [prompt.uid for prompt in self.prompts],
            "rejected": [[uid, reason] for uid, reason in self.rejected.items()],
            "unjudged": sorted(self.unjudged),
            "weights": [[prompt.uid, prompt.weight] for prompt in self.prompts if prompt.weight != 1],
        }
        for name, values in more.items():
            if values:
                facts[name] = values
        return facts

    @classmethod
    def of(cls, facts: Mapping[str, Any], groups: Sequence[Group], prompts: Sequence[Prompt]) -> "Pending":
        """Restore the object from its `facts`; `prompts` are those of `in_flight`."""
        weights = dict(facts.get("weights", ()))
        return cls(
            groups=tuple(groups),
            prompts=tuple(replace(prompt, weight=weights.get(prompt.uid, 1.0)) for prompt in prompts),
            rejected={int(uid): reason for uid, reason in facts.get("rejected", ())},
            unjudged=frozenset(facts.get("unjudged", ())),
        )


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a group says of its question.

    Args:
        useful: its completions differ.
        right, wrong: how many of them were rewarded with 1, and with 0; None: there are other rewards.
        weight: of the question when it was asked.
    """

    useful: bool
    right: int | None = None
    wrong: int | None = None
    weight: float = 1.0
