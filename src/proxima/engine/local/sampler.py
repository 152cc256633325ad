"""Samples one token from logits: truncation, inverse-CDF sampling, and both log-probs.

Every row has its own temperature, truncation and uniform number: the token of a row depends on that row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxima.data.columns import Ints
from proxima.engine.protocol import Sampling
from proxima.kernels.decode_step import sample_kernel

BLOCK = 8  # rows per block on a CPU: their logits stay in the cache
CANDIDATES = 1024  # most tokens considered for top-p before a full sort


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """`Sampling` of n rows as tensors [n]: float32, and int64 for `top_k`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, settings: Sequence[Sampling], device: torch.device) -> "SamplingRows":
        """Build one row for each of `settings`."""
        return cls(
            temperature=torch.tensor([sampling.temperature for sampling in settings], device=device),
            top_k=torch.tensor([sampling.top_k for sampling in settings], device=device),
            top_p=torch.tensor([sampling.top_p for sampling in settings], device=device),
            min_p=torch.tensor([sampling.min_p for sampling in settings], device=device),
        )

    def of_rows(self, rows: Tensor | slice) -> "SamplingRows":
        """The settings of some rows."""
        return SamplingRows(
            temperature=self.temperature[rows], top_k=self.top_k[rows], top_p=self.top_p[rows], min_p=self.min_p[rows]
        )

    @cached_property
    def alike(self) -> list[Tensor]:
        """Row indices grouped by truncation. Groups are drawn separately: truncation determines the sums of a draw and
        their number of tokens, and so the last bits of the log-probs."""
        settings = torch.stack([self.top_k.float(), self.top_p.float(), self.min_p.float()], dim=1)
        kinds, kind = settings.unique(dim=0, return_inverse=True)
        return [(kind == i).nonzero().squeeze(1) for i in range(len(kinds))]


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
        parts = list[Sampled]()
        for group in rows.alike:
            parts.append(sample_tokens(logits[group], rows.of_rows(group), uniform[group], top, masks=masks))
        order = torch.cat(rows.alike).argsort()
        columns = {name: torch.cat([part.columns[name] for part in parts])[order] for name in parts[0].columns}
        if not masks:
            return Sampled(columns, [])
        sets = list(chain.from_iterable(part.sets for part in parts))
        return Sampled(columns, [sets[row] for row in order.tolist()])
    truncates = bool(((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).any())
    suits = logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and logits.is_contiguous()
    draw = sample_kernel() if suits and not (truncates or top or masks) else None
    if draw is not None:
        tokens, log_prob = draw(logits, rows.temperature, uniform)
        return Sampled({"tokens": tokens, "sampled_log_prob": log_prob, "untruncated_log_prob": log_prob}, [])
    return Sampled(*sample_blocks(logits, rows, uniform, truncates, top, masks))


def sample_blocks(
    logits: Tensor, rows: SamplingRows, uniform: Tensor, truncates: bool, top: int, masks: bool
) -> tuple[dict[str, Tensor], list[Ints]]:
    """The fields of the `Sampled` that `sample_tokens` returns, for rows that are truncated alike; `truncates`: they
    are truncated at all."""
    step = BLOCK if logits.device.type == "cpu" else max(1, len(logits))
    any_greedy = bool((rows.temperature == 0).any())
    parts = list[dict[str, Tensor]]()
    sets = list[Ints]()
    for at in range(0, len(logits), step):
        block = slice(at, at + step)
        own = logits[block].to(torch.float32, copy=True)
        columns, own_sets = _sample_block(own, rows.of_rows(block), uniform[block], truncates, any_greedy, top, masks)
        parts.append(columns)
        sets += own_sets
    return {name: torch.cat([columns[name] for columns in parts]) for name in parts[0]}, sets


def _sample_block(
    logits: Tensor, rows: SamplingRows, uniform: Tensor, truncates: bool, any_greedy: bool, top: int, masks: bool
) -> tuple[dict[str, Tensor], list[Ints]]:
    """As `sample_blocks`, for rows that are truncated alike; `logits` [n, V] float32 is overwritten."""
    greedy = rows.temperature == 0
    logits.div_(torch.where(greedy, 1.0, rows.temperature)[:, None])
    argmax = None
    if any_greedy:
        argmax = logits.argmax(dim=1, keepdim=True)
    truncated = None
    if not truncates:
        largest = logits.amax(dim=1)
        cumulative = logits.sub(largest[:, None]).exp_()
        total = cumulative.sum(dim=1)
        log_z = largest + total.log()
        kept_log_z = log_z
        cumulative = torch.cumsum(cumulative, dim=1, out=cumulative)
    else:
        log_z = logits.logsumexp(dim=1)
        truncated, kept_log_z = truncate(logits, rows)
        cumulative = truncated.sub(kept_log_z[:, None]).exp_().cumsum_(dim=1)
    mass = cumulative[:, -1:]
    point = torch.minimum(uniform[:, None] * mass, torch.nextafter(mass, torch.zeros_like(mass)))
    token = torch.searchsorted(cumulative, point, right=True).clamp_(max=logits.shape[1] - 1)
    if argmax is not None:
        token = torch.where(greedy[:, None], argmax, token)
    chosen = logits.gather(1, token).squeeze(1)
    most_probable = dict[str, Tensor]()
    sets = list[Ints]()
    if top:
        values, ids = logits.topk(top, dim=1)
        most_probable |= {"top_k": ids.to(torch.int32), "top_k_log_prob": values - log_z[:, None]}
    if masks:
        possible = logits[:, :0] if truncated is None else truncated
        sets = possible_tokens(possible, rows)
    log_probs = {
        "sampled_log_prob": chosen - torch.where(greedy, log_z, kept_log_z),
        "untruncated_log_prob": chosen - log_z,
    }
    return {"tokens": token.squeeze(1), **log_probs, **most_probable}, sets


def truncate(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Logits with −inf where a token can't be drawn, and their logsumexp. All rows are truncated alike."""
    top_k = int(rows.top_k[0])
    top_p = rows.top_p[0]
    least = logits.amax(dim=1) + rows.min_p.log()  # min_p = 0 gives −inf
    if top_k > 0 or top_p < 1:
        vocabulary = logits.shape[1]
        candidates = max(top_k, CANDIDATES) if top_p < 1 else top_k
        smallest = _smallest_kept(logits, top_k or vocabulary, top_p, min(candidates, vocabulary))
        least = torch.maximum(smallest, least)
    truncated = logits.masked_fill(logits < least[:, None], -torch.inf)
    return truncated, truncated.logsumexp(dim=1)


def _smallest_kept(logits: Tensor, top_k: int, top_p: Tensor, candidates: int) -> Tensor:
    """[n] the smallest logit that top-k and top-p keep, from the `candidates` largest; if these hold too little mass,
    from all."""
    values, _ = logits.topk(candidates, dim=1)
    values[:, top_k:] = -torch.inf
    # mass relative to the tokens that top-k keeps: their own if top-k applies, else that of the whole vocabulary
    kept = values if top_k <= candidates else logits
    log_z = kept.logsumexp(dim=1)
    before = (values - log_z[:, None]).exp().cumsum(dim=1)
    if candidates < min(top_k, logits.shape[1]) and not bool((before[:, -1] >= top_p).all()):
        return _smallest_kept(logits, top_k, top_p, logits.shape[1])
    needed = torch.zeros_like(values, dtype=torch.bool)
    needed[:, 0] = True
    # a token is kept while those before it hold less than top_p; 1 keeps even what float32 adds to them in vain
    needed[:, 1:] = (before[:, :-1] < top_p) | (top_p >= 1)
    needed &= values > -torch.inf
    return values.masked_fill(~needed, torch.inf).amin(dim=1)


def possible_tokens(truncated: Tensor, rows: SamplingRows) -> list[Ints]:
    """The ids of the finite logits of each row; none for greedy rows."""
    inside = (truncated > -torch.inf) & (rows.temperature > 0)[:, None]
    ids = inside.nonzero()[:, 1].to(torch.int32)
    counts = inside.sum(dim=1)
    return np.split(ids.cpu().numpy(), counts.cumsum(0)[:-1].cpu().numpy())
