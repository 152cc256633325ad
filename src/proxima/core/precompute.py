"""What must be decided over the whole optimizer batch, before it is split into micro-batches.

Three things look at all tokens at once: surrogates that single out tokens (`clip_cov`, `kl_cov`, `m2po`), corrections
that normalise or rank (`normalise`, `second_moment`, `top_entropy`), and rejections that leave the denominator
(`rejected: drop`). `prepare` decides them once and writes the outcome into the batch; every split of it then gives the
same loss and gradient. For any other pair it is not needed, but allowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from proxima.core.loss import Correction, Surrogate, apply_corrections, check_needs
from proxima.core.metrics import Metrics
from proxima.data import PolicyBatch


@dataclass(frozen=True)
class Prepared:
    """`batch` with `weight`, `picked` and a loss mask reduced where a correction drops; `metrics` of the corrections,
    counted once."""

    batch: PolicyBatch
    metrics: Metrics


def needs_prepare(surrogate: Surrogate, corrections: Sequence[Correction] = ()) -> bool:
    """True when loss and gradient of micro-batches are only exact after `prepare`."""
    whole = any(
        getattr(spec, "whole_batch", False) or getattr(spec, "normalise", False) or spec.rejected == "drop"
        for spec in corrections
    )
    return whole or hasattr(surrogate, "pick")


@torch.no_grad()
def prepare(
    batch: PolicyBatch, *, surrogate: Surrogate, correction: Correction | Sequence[Correction] | None = None
) -> Prepared:
    """Decide what depends on the whole batch.

    Args:
        batch: all tokens of one optimizer step, on all ranks. `log_prob` may be of an earlier forward: what `clip_cov`,
            `kl_cov`, `m2po`
            and `towards: current` decide is then of that forward, and stays so for the whole step.
        surrogate, correction: as for `policy_loss`; pass the same ones there.
    Returns: `Prepared`; take micro-batches of its batch. Its metrics are already complete: the micro-batches don't
        repeat them.
    Raises: ValueError as `policy_loss`, for a missing tensor.
    """
    corrections: list[Any] = (
        [] if correction is None else list(correction) if isinstance(correction, (list, tuple)) else [correction]
    )
    for spec in (surrogate, *corrections):
        check_needs(spec, batch)
    done = apply_corrections(batch, corrections)
    batch = replace(batch, loss_mask=done.loss_mask, weight=done.weight)
    pick = getattr(surrogate, "pick", None)
    return Prepared(batch if pick is None else replace(batch, picked=pick(batch)), done.metrics)
