"""Checks and counts the sequences of a `PolicyBatch` that was made from tensors alone."""

from itertools import pairwise

import torch
from torch import Tensor


def counted(
    edges: Tensor, sampled: Tensor, loss_mask: Tensor, tokens: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The number of tokens, of sampled ones, and of those in the loss, of each sequence. This takes two device syncs.

    Args:
        edges: `cu_seqlens` [S+1].
        sampled, loss_mask: [N] bool.
        tokens: N.

    Raises:
        ValueError: edges that don't ascend from 0 to N, or a token in the loss that no policy sampled.
    """
    cut: list[int] = edges.tolist()
    lengths = tuple(end - start for start, end in pairwise(cut))
    if not cut or cut[0] != 0 or cut[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(f"PolicyBatch.cu_seqlens: {cut[:8]}, expected 0 … N = {tokens}, ascending.")
    masks = torch.stack([sampled, loss_mask]).cumsum(1)
    ends = torch.cat([masks.new_zeros(2, 1), masks], 1)[:, edges.long()].diff().flatten()
    *counts, wrong = torch.cat([ends, (loss_mask & ~sampled).sum()[None]]).tolist()
    if wrong:
        at = int((loss_mask & ~sampled).nonzero()[0])
        token = f"token {at} is in the loss but not sampled: no policy chose it"
        raise ValueError(f"PolicyBatch.loss_mask: {token}. Mask it, or mark it sampled.")
    return lengths, tuple(counts[: len(lengths)]), tuple(counts[len(lengths) :])
