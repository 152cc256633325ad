"""Top-k, top-p and min-p truncation of rows of logits."""

import numpy as np
import torch
from torch import Tensor

from proxima.data.columns import Ints
from proxima.engine.sampling_rows import SamplingRows

CANDIDATES = 1024  # most tokens considered for top-p before a full sort


def kept_tokens(kept: Tensor, rows: SamplingRows) -> list[Ints]:
    """The ids of the finite logits of each row; none for greedy rows."""
    inside = (kept > -torch.inf) & (rows.temperature > 0)[:, None]
    ids, counts = inside.nonzero()[:, 1].to(torch.int32), inside.sum(dim=1)
    return np.split(ids.cpu().numpy(), counts.cumsum(0)[:-1].cpu().numpy())


def truncate(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Logits with −inf where a token can't be drawn, and their logsumexp. All rows are truncated alike."""
    top_k, top_p = int(rows.top_k[0]), rows.top_p[0]
    least = logits.amax(dim=1) + rows.min_p.log()  # min_p = 0 gives −inf
    if top_k > 0 or top_p < 1:
        vocabulary = logits.shape[1]
        candidates = max(top_k, CANDIDATES if top_p < 1 else 0)
        smallest = _smallest_kept(logits, top_k or vocabulary, top_p, min(candidates, vocabulary))
        least = torch.maximum(smallest, least)
    kept = logits.masked_fill(logits < least[:, None], -torch.inf)
    return kept, kept.logsumexp(dim=1)


def _smallest_kept(logits: Tensor, top_k: int, top_p: Tensor, candidates: int) -> Tensor:
    """[n] the smallest logit that top-k and top-p keep, from the `candidates` largest; if these hold too little mass,
    from all."""
    values, _ = logits.topk(candidates, dim=1)
    values[:, top_k:] = -torch.inf
    # mass relative to the tokens that top-k keeps: their own if top-k applies, else that of the whole vocabulary
    log_z = values.logsumexp(dim=1) if top_k <= candidates else logits.logsumexp(dim=1)
    before = (values - log_z[:, None]).exp().cumsum(dim=1)
    if candidates < min(top_k, logits.shape[1]) and not bool((before[:, -1] >= top_p).all()):
        return _smallest_kept(logits, top_k, top_p, logits.shape[1])
    needed = torch.zeros_like(values, dtype=torch.bool)
    needed[:, 0] = True
    # a token is kept while those before it hold less than top_p; 1 keeps even what float32 adds to them in vain
    needed[:, 1:] = (before[:, :-1] < top_p) | (top_p >= 1)
    needed &= values > -torch.inf
    return values.masked_fill(~needed, torch.inf).amin(dim=1)
