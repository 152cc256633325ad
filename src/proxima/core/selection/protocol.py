"""Selection: the choice of completions for the update. Each spec sees only what the specs before it kept."""

import math
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from proxima.core.spec import Spec
from proxima.data.outcomes import Outcomes


class Selection(Spec, Protocol):
    """A frozen dataclass; calling it gives [S] bool, True for the completions that are kept. Subclass it to get the
    defaults.

    needs: {"advantage"} if it reads the advantage; an advantage of tokens is unknown while a batch is being filled.
    reason: the name of its drops in logs.
    local: the decision on a group depends on that group alone. While dynamic sampling fills a batch, it asks the local
        specs that come before any other one which groups are worth keeping.
    """

    reason: ClassVar[str]

    @property
    def local(self) -> bool:
        return False

    def prompts_factor(self, size: int) -> int:
        """The factor by which this spec raises the number of prompts of a step, with groups of `size`."""
        return 1

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor: ...


def select(
    specs: Sequence[Selection], outcomes: Outcomes, advantage: Tensor, *, unscored: bool = False
) -> tuple[Tensor, list[str | None]]:
    """Apply the specs in order.

    Args:
        specs: each sees only the completions that the earlier ones kept.
        outcomes: S completions; invalid ones are dropped first, for the reason "invalid". Those that `prune` has
            stopped it counts, and drops itself; without it, as after a recipe has changed, their reason is "stopped".
        advantage: [S].
        unscored: keep invalid ones too, until a spec drops them.
    Returns: keep [S] bool, and the reason why each completion was dropped, None if it was kept.
    """
    if unscored:
        keep = torch.ones_like(outcomes.valid)
    else:
        keep = outcomes.valid.clone()
    stopped = outcomes.stopped
    if stopped is not None:
        keep |= stopped
    reasons: list[str | None] = [None if valid else "invalid" for valid in keep.tolist()]
    for spec in specs:
        left = keep.nonzero().flatten()
        kept = spec(outcomes.take(left), advantage[left])
        for i in left[~kept].tolist():
            reasons[i] = spec.reason
        keep[left] = kept
    if stopped is not None:
        for i in (keep & stopped).nonzero().flatten().tolist():
            reasons[i] = "stopped"
        keep &= ~stopped
    return keep, reasons


def prompts_factor(specs: Sequence[Selection], size: int) -> int:
    """The factor by which all specs together raise the number of prompts of a step, with groups of `size`."""
    return math.prod(spec.prompts_factor(size) for spec in specs)
