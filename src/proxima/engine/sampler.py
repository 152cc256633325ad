"""Samples one token from logits: truncation, inverse-CDF sampling, and both log-probs.

Every row has its own temperature, truncation and uniform number: the token of a row depends on that row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxima.engine.sampling_rows import SamplingRows

if TYPE_CHECKING:
    from proxima.kernels.sample import Draw


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """token [n] int64; sampled_log_prob (of the distribution sampled from) and untruncated_log_prob (temperature only)
    [n] float32, nats.

    top_k [n, K] int64 and top_k_log_prob [n, K] float32: the most probable tokens, untruncated; None unless requested.
    mask_ids [M] and mask_counts [n] int64: the tokens that could be drawn, ascending, row by row, and their number in
    each row: 0 where nothing is truncated or the row is greedy; None unless requested.
    """

    token: Tensor
    sampled_log_prob: Tensor
    untruncated_log_prob: Tensor
    top_k: Tensor | None = None
    top_k_log_prob: Tensor | None = None
    mask_ids: Tensor | None = None
    mask_counts: Tensor | None = None


def sample_tokens(logits: Tensor, rows: SamplingRows, uniform: Tensor, top: int = 0, *, masks: bool = False) -> Sampled:
    """Draw one token for each row.

    Args:
        logits: [n, V], any float dtype; computed with in float32.
        rows: temperature 0 is greedy: the largest logit, with both log-probs at temperature 1.
        uniform: [n] float32 in [0, 1).
        top: number of most probable tokens to return with their log-probs.
        masks: also return the tokens that could be drawn.

    The draw is the first token whose cumulative probability exceeds the uniform number, tokens in vocabulary order; a
    token of probability 0 is never drawn. The cumulative sum is float32: tokens rarer than about 6e-8 may be merged
    with a neighbour.
    """
    if len(rows.alike) > 1:
        drawn = [
            sample_tokens(logits[group], rows.of_rows(group), uniform[group], top, masks=masks) for group in rows.alike
        ]
        return _in_order(drawn, torch.cat(rows.alike).argsort())
    truncates = bool(((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).any())
    if not (truncates or top or masks) and (draw := _kernel(logits)) is not None:
        token, log_prob = draw(logits, rows.temperature, uniform)
        return Sampled(token=token, sampled_log_prob=log_prob, untruncated_log_prob=log_prob)
    from proxima.engine.block_sampler import sample_blocks

    return Sampled(**sample_blocks(logits, rows, uniform, truncates, top, masks))


def _in_order(parts: Sequence[Sampled], order: Tensor) -> Sampled:
    """Concatenate the rows of all parts and reorder them."""
    names = [name for name, value in vars(parts[0]).items() if value is not None]
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    if "mask_ids" not in joined:
        return Sampled(**{name: column[order] for name, column in joined.items()})
    masks = joined.pop("mask_ids").split(joined["mask_counts"].tolist())
    ids = torch.cat([masks[row] for row in order.tolist()])
    return Sampled(mask_ids=ids, **{name: column[order] for name, column in joined.items()})


def _kernel(logits: Tensor) -> "Draw | None":
    """The kernel that draws from these logits without truncation, in fewer passes; None to use eager torch."""
    if logits.dtype != torch.bfloat16 or logits.device.type != "cpu" or not logits.is_contiguous():
        return None
    from proxima.kernels.sample import sample_kernel

    return sample_kernel()
