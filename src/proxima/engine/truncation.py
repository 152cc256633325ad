"""Top-k, top-p and min-p truncation of rows of logits."""

import torch
from torch import Tensor

from proxima.engine.sampling_rows import SamplingRows

CANDIDATES = 1024  # most tokens considered for top-p before a full sort


def kept_tokens(kept: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """The ids of finite logits [m], row by row, and their number in each row [n]; none for rows that are not
    truncated."""
    wanted = (rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
    inside = (kept > -torch.inf) & wanted[:, None]
    return inside.nonzero()[:, 1], inside.sum(dim=1)


def truncate(logits: Tensor, log_z: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Logits with −inf where a token can't be drawn, and their logsumexp; the arguments when nothing is truncated."""
    top_k, top_p = bool((rows.top_k > 0).any()), bool((rows.top_p < 1).any())
    if not top_k and not top_p and not bool((rows.min_p > 0).any()):
        return logits, log_z
    vocabulary = logits.shape[1]
    floor = torch.full_like(log_z, -torch.inf)
    if top_k or top_p:
        candidates = max(int(rows.top_k.max()), CANDIDATES if top_p else 0)
        smallest = _smallest_kept(logits, rows, min(candidates, vocabulary))
        if smallest is None:  # the candidates hold too little mass: sort everything
            smallest = _smallest_kept(logits, rows, vocabulary)
        assert smallest is not None
        floor = smallest
    least = logits.amax(dim=1) + rows.min_p.log()  # min_p = 0 gives −inf
    kept = logits.masked_fill(logits < torch.maximum(floor, least)[:, None], -torch.inf)
    return kept, kept.logsumexp(dim=1)


def _smallest_kept(logits: Tensor, rows: SamplingRows, candidates: int) -> Tensor | None:
    """[n] the smallest logit that top-k and top-p keep, from the `candidates` largest; None if these hold too little
    mass."""
    values, _ = logits.topk(candidates, dim=1)
    rank = torch.arange(candidates, device=logits.device)
    k = torch.where(rows.top_k > 0, rows.top_k, logits.shape[1])[:, None]
    values = values.masked_fill(rank >= k, -torch.inf)
    # mass relative to the tokens that top-k keeps: their own if top-k applies, else that of the whole vocabulary
    log_z = torch.where(k[:, 0] <= candidates, values.logsumexp(dim=1), logits.logsumexp(dim=1))
    before = (values - log_z[:, None]).exp().cumsum(dim=1)
    enough = (
        (k[:, 0] <= candidates) | (rows.top_p >= 1) | (before[:, -1] >= rows.top_p) | (candidates == logits.shape[1])
    )
    if not bool(enough.all()):
        return None
    needed = torch.zeros_like(values, dtype=torch.bool)
    needed[:, 0] = True
    needed[:, 1:] = before[:, :-1] < rows.top_p[:, None]  # a token is kept while those before it hold less than top_p
    needed &= values > -torch.inf
    floor = values.masked_fill(~needed, torch.inf).amin(dim=1)
    untouched = (rows.top_p >= 1) & (rows.top_k == 0)
    return floor.masked_fill(untouched, -torch.inf)
