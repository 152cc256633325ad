"""Selection: which completions go on to the update. Specs are applied in order; each sees only what those before it kept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from torch import Tensor

from proxima.core.advantage import GroupStatistics
from proxima.data import Outcomes


class Selection(Protocol):
    """A frozen dataclass; calling it gives [S] bool, True for the completions that stay. `reason` names its drops in logs."""

    reason: ClassVar[str]

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class DropUniformGroups:
    """Drop the groups whose valid rewards are all equal: their group-relative advantages are 0 and teach nothing.

    Args:
        outcomes: rewards, validity, groups.
        advantage: [S], not looked at.
    Returns: [S] bool, False for every completion of such a group.
    Edge cases: uniform is max == min over the valid rewards, never a small standard deviation; a group with fewer than two is uniform.
    Source: dynamic sampling of DAPO, arXiv 2503.14476, Eq. 11.
    """

    reason: ClassVar[str] = "uniform_group"

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        return ~GroupStatistics.of(outcomes).uniform


def select(specs: Sequence[Selection], outcomes: Outcomes, advantage: Tensor) -> tuple[Tensor, list[str | None]]:
    """Apply the specs in order.

    Args:
        specs: each sees only the completions that those before it kept.
        outcomes: S completions; invalid ones are dropped first, for the reason "invalid".
        advantage: [S].
    Returns: keep [S] bool, and for each completion why it was dropped (None: kept). `collections.Counter(reasons)` counts them.
    """
    keep = outcomes.valid.clone()
    reasons: list[str | None] = [None if valid else "invalid" for valid in keep.tolist()]
    for spec in specs:
        rows = keep.nonzero().flatten()
        own = {name: getattr(outcomes, name)[rows] for name in ("reward", "valid", "group", "length", "truncated")}
        stays = spec(replace(outcomes, **own), advantage[rows])
        for row in rows[~stays].tolist():
            reasons[row] = spec.reason
        keep[rows] = stays
    return keep, reasons


SELECTIONS: dict[str, type] = {"drop_uniform_groups": DropUniformGroups}

__all__ = ["SELECTIONS", "DropUniformGroups", "Selection", "select"]
