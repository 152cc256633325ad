"""Samples one token from logits: truncation, inverse-CDF sampling, and both log-probs.

Every row has its own temperature, truncation and uniform number: the token of a row depends on that row alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from proxima.data.columns import Ints
from proxima.engine.block_sampler import sample_blocks
from proxima.engine.sampling_rows import SamplingRows
from proxima.kernels.sample import sample_kernel


class Sampled(NamedTuple):
    """A token for each of n rows.

    columns: those of `TokenTable`. tokens [n] int64; sampled_log_prob (of the distribution sampled from) and
        untruncated_log_prob (temperature only) [n] float32, nats; if requested, top_k [n, K] int32 and top_k_log_prob
        [n, K] float32, the most probable tokens, untruncated.
    sets: if requested, the tokens that could be drawn in each row, ascending: none where nothing is truncated or the
        row is greedy.
    """

    columns: dict[str, Tensor]
    sets: list[Ints]


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
        parts = [
            sample_tokens(logits[group], rows.of_rows(group), uniform[group], top, masks=masks) for group in rows.alike
        ]
        order, sets = torch.cat(rows.alike).argsort(), [ids for part in parts for ids in part.sets]
        columns = {name: torch.cat([part.columns[name] for part in parts])[order] for name in parts[0].columns}
        return Sampled(columns, [sets[row] for row in order.tolist()] if masks else [])
    truncates = bool(((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).any())
    suits = logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and logits.is_contiguous()
    if suits and not (truncates or top or masks) and (draw := sample_kernel()) is not None:
        tokens, log_prob = draw(logits, rows.temperature, uniform)
        return Sampled({"tokens": tokens, "sampled_log_prob": log_prob, "untruncated_log_prob": log_prob}, [])

    return Sampled(*sample_blocks(logits, rows, uniform, truncates, top, masks))
