"""Samples by the operations of torch: on every device, in every dtype, truncated or not."""

import torch
from torch import Tensor

from proxima.data.columns import Ints
from proxima.engine.sampling_rows import SamplingRows
from proxima.engine.truncation import kept_tokens, truncate

BLOCK = 8  # rows per block on a CPU: their logits stay in the cache


def sample_blocks(
    logits: Tensor, rows: SamplingRows, uniform: Tensor, truncates: bool, top: int, masks: bool
) -> tuple[dict[str, Tensor], list[Ints]]:
    """The fields of the `Sampled` that `sample_tokens` returns, for rows that are truncated alike; `truncates`: they
    are truncated at all."""
    step = BLOCK if logits.device.type == "cpu" else max(1, len(logits))
    options = truncates, bool((rows.temperature == 0).any()), top, masks
    blocks = [slice(at, at + step) for at in range(0, len(logits), step)]
    parts = [
        _sample_block(logits[b].to(torch.float32, copy=True), rows.of_rows(b), uniform[b], *options) for b in blocks
    ]
    columns = {name: torch.cat([own[name] for own, _ in parts]) for name in parts[0][0]}
    return columns, [ids for _, sets in parts for ids in sets]


def _sample_block(
    logits: Tensor, rows: SamplingRows, uniform: Tensor, truncates: bool, any_greedy: bool, top: int, masks: bool
) -> tuple[dict[str, Tensor], list[Ints]]:
    """As `sample_blocks`, for rows that are truncated alike; `logits` [n, V] float32 is overwritten."""
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
        log_z = logits.logsumexp(dim=1)
        kept, kept_log_z = truncate(logits, rows)
        cumulative = kept.sub(kept_log_z[:, None]).exp_().cumsum_(dim=1)
    mass = cumulative[:, -1:]
    point = torch.minimum(uniform[:, None] * mass, torch.nextafter(mass, torch.zeros_like(mass)))
    token = torch.searchsorted(cumulative, point, right=True).clamp_(max=logits.shape[1] - 1)
    if argmax is not None:
        token = torch.where(greedy[:, None], argmax, token)
    chosen = logits.gather(1, token).squeeze(1)
    more, sets = dict[str, Tensor](), list[Ints]()
    if top:
        values, ids = logits.topk(top, dim=1)
        more |= {"top_k": ids.to(torch.int32), "top_k_log_prob": values - log_z[:, None]}
    if masks:
        sets = kept_tokens(logits[:, :0] if kept is None else kept, rows)
    own = {"sampled_log_prob": chosen - torch.where(greedy, log_z, kept_log_z), "untruncated_log_prob": chosen - log_z}
    return {"tokens": token.squeeze(1), **own, **more}, sets
