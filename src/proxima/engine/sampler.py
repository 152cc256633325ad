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

BLOCK = 8  # rows per block on a CPU: their logits stay in the cache


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
    step = BLOCK if logits.device.type == "cpu" else max(1, len(logits))
    truncates = bool(((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).any())
    if not (truncates or top or masks) and (draw := _kernel(logits)) is not None:
        token, log_prob = draw(logits, rows.temperature, uniform)
        return Sampled(token=token, sampled_log_prob=log_prob, untruncated_log_prob=log_prob)
    options = truncates, bool((rows.temperature == 0).any()), top, masks
    blocks = [slice(at, at + step) for at in range(0, len(logits), step)]
    parts = [
        _sample_block(logits[b].to(torch.float32, copy=True), rows.of_rows(b), uniform[b], *options) for b in blocks
    ]
    return Sampled(**_joined(parts))


def _joined(parts: Sequence[Sampled]) -> dict[str, Tensor]:
    """The rows of all parts."""
    names = [name for name, value in vars(parts[0]).items() if value is not None]
    return {name: torch.cat([getattr(part, name) for part in parts]) for name in names}


def _in_order(parts: Sequence[Sampled], order: Tensor) -> Sampled:
    """Concatenate the rows of all parts and reorder them."""
    joined = _joined(parts)
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


def _sample_block(
    logits: Tensor, rows: SamplingRows, uniform: Tensor, truncates: bool, any_greedy: bool, top: int, masks: bool
) -> Sampled:
    """As `sample_tokens`, for rows that are truncated alike; `logits` [n, V] float32 is overwritten."""
    greedy = rows.temperature == 0
    logits.div_(torch.where(greedy, 1.0, rows.temperature)[:, None])
    argmax = logits.argmax(dim=1, keepdim=True) if any_greedy else None
    kept = None
    if not truncates:
        largest = logits.amax(dim=1)
        cumulative = logits.sub(largest[:, None]).exp_()
        total = cumulative.sum(dim=1)
        log_z = kept_log_z = largest + total.log()
        cumulative = torch.cumsum(cumulative, dim=1, out=cumulative)
    else:
        from proxima.engine.truncation import truncate

        log_z = logits.logsumexp(dim=1)
        kept, kept_log_z = truncate(logits, rows)
        cumulative = kept.sub(kept_log_z[:, None]).exp_().cumsum_(dim=1)
    mass = cumulative[:, -1:]
    point = torch.minimum(uniform[:, None] * mass, torch.nextafter(mass, torch.zeros_like(mass)))
    token = torch.searchsorted(cumulative, point, right=True).clamp_(max=logits.shape[1] - 1)
    if argmax is not None:
        token = torch.where(greedy[:, None], argmax, token)
    chosen = logits.gather(1, token).squeeze(1)
    more = dict[str, Tensor]()
    if top:
        values, more["top_k"] = logits.topk(top, dim=1)
        more["top_k_log_prob"] = values - log_z[:, None]
    if masks:
        from proxima.engine.truncation import kept_tokens

        more["mask_ids"], more["mask_counts"] = kept_tokens(logits[:, :0] if kept is None else kept, rows)
    return Sampled(
        token=token.squeeze(1),
        sampled_log_prob=chosen - torch.where(greedy, log_z, kept_log_z),
        untruncated_log_prob=chosen - log_z,
        **more,
    )
