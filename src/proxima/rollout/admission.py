"""The limits on admitting prompts during asynchronous training."""

from dataclasses import dataclass
from typing import Literal

OverAge = Literal["wait", "drop", "train"]


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The number of prompts that may be in flight.

        capacity = min(C - generating, (max_lag + s + 1) B - (accepted + running), steps B - (accepted + running))

    and never below 0. The first term bounds the engine's load. The second bounds the lag: if groups are used in the
    order of admission, one that is admitted after s steps is used by step s + 1 + max_lag at the latest, and a step
    produces at most one policy version. The third stops admissions at the end of the run.

    Source: AReaL's staleness control, arXiv 2505.24298, 5.1. Differs: s counts finished steps, not versions, because a
    step that trains nothing must not stall the admissions; prompts that wait for their rewards or their batch are
    `running`, but don't occupy the engine; and the end of the run is known.

    Args:
        prompts: B, groups of a full batch; >= 1.
        concurrent: C, prompts that the engine generates at once; >= 1.
        max_lag: policy versions that a group may be behind when it is used; >= 1.
        steps: number of steps of the whole run.
        over_age: see `AsyncCollector`.
    """

    prompts: int
    concurrent: int
    max_lag: int
    steps: int
    over_age: OverAge = "wait"

    def capacity(self, *, finished: int, accepted: int, running: int, generating: int) -> int:
        """Prompts that may be admitted now.

        Args:
            finished: s, the finished steps.
            accepted: groups of the run so far that were used or wait to be used; a batch counts as full. One that was
                rejected or evicted does not count: its place is free again.
            running: prompts admitted whose group is neither accepted nor rejected yet.
            generating: the running prompts that the engine works on.
        """
        admitted = accepted + running
        free = self._lag_bound(finished) - admitted, self.steps * self.prompts - admitted
        return max(0, min(self.concurrent - generating, *free))

    def stalled(self, *, finished: int, accepted: int, running: int, generating: int) -> bool:
        """Return True if the engine has a free place that only `max_lag` keeps empty."""
        needed = self._lag_bound(finished) <= accepted + running < self.steps * self.prompts
        return generating < self.concurrent and needed

    def _lag_bound(self, finished: int) -> int:
        return (self.max_lag + finished + 1) * self.prompts
