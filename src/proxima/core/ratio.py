"""Log-ratio and ratio of current to proximal policy. Every surrogate uses these, so all clamp alike."""

from typing import Literal

import torch
from torch import Tensor

from proxima.core.segment import segment_mean
from proxima.data.policy_batch import PolicyBatch

LOG_RATIO_LIMIT = 20.0
Level = Literal["token", "sequence"]
Centre = Literal["behavior", "proximal"]


def masked_log_ratio(b: PolicyBatch) -> Tensor:
    """ℓ = log π − log π_prox, [N] nats, with gradient, unclamped; 0 outside the loss mask."""
    return b.masked("log_prob") - b.masked("proximal_log_prob")


def masked_ratio(b: PolicyBatch, level: Level = "token") -> Tensor:
    """r = exp(clamp(ℓ, −20, 20)), [N], with gradient; 1 outside the loss mask.

    At level "sequence", ℓ is replaced by its mean over the loss tokens of the sequence, with the gradient through the
    mean, and r is the same for all of them. exp(20) = 4.85e8 is finite in float32; beyond the clamp the gradient is 0.
    """
    log_ratio = masked_log_ratio(b)
    if level == "sequence":
        log_ratio = spread(b, segment_mean(log_ratio, b.loss_mask, b.cu_seqlens))
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_advantage(b: PolicyBatch) -> Tensor:
    """[N] the mean advantage of the sequence's loss tokens at each of them, 0 outside the loss."""
    return spread(b, segment_mean(b.masked("advantage"), b.loss_mask, b.cu_seqlens))


def either(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """[N] `yes` or `no` in the dtype of `like`; `torch.where` on Python numbers would round them to float32."""
    chosen = torch.full((), yes, dtype=like.dtype, device=like.device)
    other = torch.full((), no, dtype=like.dtype, device=like.device)
    return torch.where(condition, chosen, other)


def spread(b: PolicyBatch, values: Tensor) -> Tensor:
    """[S] → [N]: the sequence's value at each of its loss tokens, 0 outside the loss."""
    return torch.where(b.loss_mask, values[b.sequence_index], 0.0)


def ratio_loss(b: PolicyBatch, keep: Tensor, cap: float | None) -> Tensor:
    """[N]: −A r on the kept tokens, or −A sg(min(r, c)) log π with a cap c, which bounds the gradient; 0 elsewhere."""
    ratio = masked_ratio(b)
    advantage = b.masked("advantage")
    if cap is None:
        loss = -advantage * ratio
    else:
        loss = -advantage * ratio.detach().clamp(max=cap) * b.masked("log_prob")
    return torch.where(keep, loss, 0.0)


def returns_to(b: PolicyBatch, centre: Centre) -> Tensor:
    """[N] bool, True where the token's update does not move π away from the centre, A (log π − log π_centre) ≤ 0, and
    outside the loss."""
    log_ratio = b.masked("log_prob").detach() - b.masked(f"{centre}_log_prob")
    return b.masked("advantage") * log_ratio.sign() <= 0
