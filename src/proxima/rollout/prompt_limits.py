"""Limits on the prompts drawn: by a step under dynamic sampling, and at once during asynchronous training.

DynamicSampling      settings: generate until the batch is full of groups that survive the selection
running_acceptance   the share of generated groups that could be used lately, which sizes the next generation batch
InFlightLimit        the number of prompts that may be in flight
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from proxima.data import require


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Generate until the batch is full of groups that the selection does not drop (DAPO, arXiv 2503.14476, 3.2)."""

    max_num_gen_batches: Annotated[int, "generation batches a step at most; <= 0: no limit"] = 10
    exhausted: Annotated[
        Literal["stop", "partial"], "after the last generation batch: end the run, or train on the groups there are"
    ] = "stop"
    oversample: Annotated[
        float | None, "prompts of a generation batch, in batches; null: the missing prompts / the running acceptance"
    ] = None

    def __post_init__(self) -> None:
        valid = self.oversample is None or 1 <= self.oversample < math.inf
        require(valid, "oversample", self.oversample, "must be >= 1, or null")

    def generation_batch(self, prompts: int) -> int | None:
        """The prompts of a generation batch, for a step of `prompts`; None: the running acceptance decides."""
        if self.oversample is None:
            return None
        return math.ceil(self.oversample * prompts - 1e-9)  # 29 / 7 of 7 prompts is 29


# Finished steps that count in the running acceptance; few, because it changes from step to step early in a run.
REMEMBERED_STEPS = 3
MAX_OVERSAMPLE = 4  # in batches: the largest generation batch that the running acceptance may request


def running_acceptance(history: Iterable[Mapping[str, Any]], judged: int = 0, accepted: int = 0) -> float:
    """The share of generated groups that could be used: (accepted + 1) / (judged + 1).

    It is 1 without any data, and never 0. Groups without a score don't count as judged.

    Args:
        history: metrics of the finished steps, newest first. Only the last `REMEMBERED_STEPS` that generated groups
            count, and none before a step without these counts.
        judged, accepted: numbers of groups of the unfinished step.
    """
    steps = 0
    for record in history:
        if "prompts_accepted" not in record or steps == REMEMBERED_STEPS:
            break
        steps += record["prompts_generated"] > 0
        judged += int(record["prompts_generated"]) - int(record["prompts_unscored"])
        accepted += int(record["prompts_accepted"])
    return (accepted + 1) / (judged + 1)


OverAge = Literal["wait", "drop", "train"]


@dataclass(frozen=True, kw_only=True)
class InFlightLimit:
    """A limit on the prompts in flight.

        capacity = min(C - generating, (max_lag + s + 1) B - (accepted + running), steps B - (accepted + running))

    and never below 0. The first term bounds the engine's load. The second bounds the lag: if groups are used in the
    order of the data, one that is enqueued after s steps is used by step s + 1 + max_lag at the latest, and a step
    produces at most one policy version. The third stops drawing at the end of the run.

    Source: AReaL's staleness control, arXiv 2505.24298, 5.1. Differs: s counts finished steps, not versions, because a
    step that trains nothing must not stall generation; prompts that wait for their rewards or their batch are
    `running`, but don't occupy the engine; and the end of the run is known.

    Args:
        prompts: B, groups of a full batch; >= 1.
        concurrent: C, prompts for which the engine generates at once; >= 1.
        max_lag: number of policy versions by which a group may be behind when it is used; >= 1.
        steps: number of steps of the whole run.
        over_age: see `AsyncCollector`.
    """

    prompts: int
    concurrent: int
    max_lag: int
    steps: int
    over_age: OverAge = "wait"

    def capacity(self, *, finished: int, accepted: int, running: int, generating: int) -> int:
        """Prompts that may be enqueued now.

        Args:
            finished: s, the finished steps.
            accepted: groups of the run so far that were used or wait to be used; a batch counts as full. One that was
                rejected or evicted does not count: its place is free again.
            running: prompts enqueued whose group is neither accepted nor rejected yet.
            generating: the running prompts that the engine works on.
        """
        drawn = accepted + running
        within_load = self.concurrent - generating
        within_lag = self._lag_bound(finished) - drawn
        within_run = self.steps * self.prompts - drawn
        return max(0, min(within_load, within_lag, within_run))

    def stalled(self, *, finished: int, accepted: int, running: int, generating: int) -> bool:
        """Return True if the engine has a free place that only `max_lag` keeps empty."""
        kept_by_lag = self._lag_bound(finished) <= accepted + running < self.steps * self.prompts
        return generating < self.concurrent and kept_by_lag

    def _lag_bound(self, finished: int) -> int:
        return (self.max_lag + finished + 1) * self.prompts
