"""Dynamic sampling: generate until the batch is full of groups that survive the selection."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from proxima.data import require

# Finished steps that count in the running acceptance; few, because it changes from step to step early in a run.
REMEMBERED_STEPS = 3
MAX_OVERSAMPLE = 4  # in batches: the largest generation batch that the running acceptance may request


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


def running_acceptance(history: Iterable[Mapping[str, Any] | None], judged: int = 0, accepted: int = 0) -> float:
    """The share of generated groups that could be used: (accepted + 1) / (judged + 1).

    It is 1 without any data, and never 0. Groups without a score don't count as judged.

    Args:
        history: metrics of the finished steps, newest first; counting stops at a step without these counts.
        judged, accepted: number of groups of the unfinished step.
    """
    steps = 0
    for record in history:
        if record is None or "prompts_accepted" not in record or steps == REMEMBERED_STEPS:
            break
        steps += record["prompts_generated"] > 0
        judged += int(record["prompts_generated"]) - int(record["prompts_unscored"])
        accepted += int(record["prompts_accepted"])
    return (accepted + 1) / (judged + 1)
