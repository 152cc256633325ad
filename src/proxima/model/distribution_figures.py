"""Statistics of the whole distribution at a token, from hidden states and without gradient, in the chunks of
`token_log_prob`."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from proxima.model.kept_tokens import KeptTokens
from proxima.model.logit_rows import row_blocks
from proxima.model.parallel.vocabulary import VocabularyPart


class TopTokens(NamedTuple):
    """The result of `top_k_log_prob`: log-probs of the targets [N], ids and log-probs of the top tokens [N, k],
    descending."""

    log_prob: Tensor
    ids: Tensor
    top: Tensor


@torch.no_grad()
def top_k_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    vocabulary: int | None = None,
    part: VocabularyPart | None = None,
    chunk: int = 512,
) -> TopTokens:
    """Log-probs of the targets and of the most probable tokens, float32, nats, without gradient, in one pass.

    Args:
        hidden, weight, bias, target [N], temperature [N], part, chunk: as `token_log_prob`.
        k: tokens, >= 0, at most `vocabulary`.
        vocabulary: only ids below it are considered; the log-probs are still normalised over all rows of `weight`.
    """
    kind = hidden.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        h, w = hidden.to(compute), weight.to(compute)
        b = None if bias is None else bias.to(compute)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        log_z, chosen = torch.empty(2, len(hidden), dtype=exact, device=hidden.device)
        ids = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
        top = torch.full_like(ids, -torch.inf, dtype=exact)
        first, near = (0, target) if part is None else (part.start, part.local(target))
        within = len(weight) if vocabulary is None else min(max(0, vocabulary - first), len(weight))
        own = min(k, within)  # fewer than k only of a part
        for at in range(0, len(hidden), chunk):
            span = slice(at, at + chunk)
            for rows, logits in row_blocks(F.linear(h[span], w, b), temperature[span]):
                largest = logits[:, :within].topk(own, dim=1)
                ids[span][rows, :own], top[span][rows, :own] = largest.indices + first, largest.values
                chosen[span][rows] = logits.gather(1, near[span][rows, None]).squeeze(1)
                log_z[span][rows] = logits.logsumexp(1)
                del logits
        if part is not None:
            log_z, chosen = part.logsumexp(log_z), part.values_of(target, chosen)
            top, ids = part.largest(top, ids, k)
    return TopTokens(chosen - log_z, ids, top - log_z[:, None])


@torch.no_grad()
def log_sum_square(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    kept: KeptTokens | None = None,
    part: VocabularyPart | None = None,
    chunk: int = 512,
) -> Tensor:
    """[N] float32 (float64 for float64 input), without gradient: log Σ_v π_v², the log of the probability that two
    draws at a position agree; draws are from `kept` where it is given. Args: as `token_log_prob`, temperature [N]. It
    costs one more product with the head."""
    kind = hidden.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        h, w, b = hidden.to(compute), weight.to(compute), None if bias is None else bias.to(compute)
        sums = torch.empty(len(h), dtype=torch.promote_types(compute, torch.float32), device=h.device)
        logs = torch.empty_like(sums)
        kept = kept if part is None or kept is None else part.kept(kept)
        for at in range(0, len(h), chunk):
            span = slice(at, at + chunk)
            for rows, logits in row_blocks(F.linear(h[span], w, b), temperature[span]):
                square, log_z = (2 * logits).logsumexp(1), logits.logsumexp(1)
                if kept is not None:
                    kept_logits = kept.of(logits, at + rows.start)
                    square, log_z = kept_logits.logsumexp(square, scale=2.0), kept_logits.logsumexp(log_z)
                sums[span][rows], logs[span][rows] = square, log_z
                del logits
        if part is not None:
            sums, logs = part.logsumexp(sums), part.logsumexp(logs)
        return sums - 2 * logs
