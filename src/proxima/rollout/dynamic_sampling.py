"""Dynamic sampling: generate until the batch is full of groups that survive the selection."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

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
