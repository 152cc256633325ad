"""Log-probs of the tokens that a policy sampled, for batches that also have others."""

from typing import Any

import torch
from torch import Tensor

from proxima.data import PackedBatch
from proxima.model.log_prob import TokenLogProbs, token_log_prob


def sampled_log_prob(batch: PackedBatch, hidden: Tensor, *, others: Tensor | None, **settings: Any) -> TokenLogProbs:
    """`token_log_prob` of the batch's targets, with the output head run only for the `sampled` ones: all values of the
    others, which no loss or metric reads, are 0. For a batch without a sampled token one row is run, so that every rank
    joins the passes of a sharded head."""
    count = max(1, sum(batch.sampled_of))
    rows = torch.argsort((~batch.sampled).long(), stable=True)[:count]  # `nonzero` would wait for the device
    settings |= {"target": batch.target[rows], "temperature": batch.temperature[rows]}
    others = None if others is None else others[rows]
    log_probs = token_log_prob(hidden.index_select(0, rows), others=others, **settings)

    def spread(own: Tensor) -> Tensor:
        return own.new_zeros(len(hidden), *own.shape[1:]).index_copy(0, rows, own)

    entropy, more = (None if own is None else spread(own) for own in log_probs[1:])
    return TokenLogProbs(spread(log_probs.log_prob), entropy, more)
