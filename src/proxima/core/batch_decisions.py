"""Decisions over the whole optimizer batch, taken before it is split into micro-batches.

Three things look at all tokens at once: surrogates that select tokens (`clip_cov`, `kl_cov`, `m2po`), corrections that
normalise or rank (`normalise`, `second_moment`, `top_entropy`), and rejections that leave the denominator (`rejected:
drop`). `precompute` decides them once and writes the outcome into the batch; every split of it then gives the same loss
and gradient. Other specs do not need it, but allow it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from proxima.core.loss import Correction, Surrogate, apply_corrections, as_list, check_needs
from proxima.core.metrics import Metrics
from proxima.data.policy_batch import PolicyBatch


@dataclass(frozen=True)
class Precomputed:
    """`batch` with `weight`, `selected` and a loss mask reduced where a correction drops; `metrics` of the corrections,
    counted once."""

    batch: PolicyBatch
    metrics: Metrics

    def take(self, sequences: Sequence[int]) -> "Precomputed":
        """The part for a micro-batch; the metrics stay with the whole."""
        return Precomputed(self.batch.take(sequences), {})


@torch.no_grad()
def precompute(
    batch: PolicyBatch, *, surrogate: Surrogate, correction: Correction | Sequence[Correction] | None = None
) -> Precomputed:
    """Make the decisions that depend on the whole batch.

    Args:
        batch: all tokens of one optimizer step, on all ranks. `log_prob` may be of an earlier forward: then `clip_cov`,
            `kl_cov`, `m2po` and `towards: current` decide by that forward, for the whole step.
        surrogate, correction: as for `policy_loss`; pass the same ones there.
    Returns: `Precomputed`; `take` micro-batches of it. Its metrics are complete: the micro-batches do not repeat
        them.
    Raises: ValueError as `policy_loss`, for a missing tensor.
    """
    corrections = as_list(correction)
    for spec in (surrogate, *corrections):
        check_needs(spec, batch)
    batch, _, metrics = apply_corrections(batch, corrections)
    return Precomputed(replace(batch, selected=surrogate.select_tokens(batch)), metrics)
