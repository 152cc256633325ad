"""Divergences of the current policy from the behavior policy over buckets of the vocabulary: each of the behavior
policy's K most probable tokens, the sampled token, and all others."""

from collections.abc import Callable

import torch
from torch import Tensor

from proxima.data import PolicyBatch

TOP_K_FLOOR = 1e-12  # minimum probability of a bucket under the current policy


def top_k_buckets(b: PolicyBatch, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Buckets under μ and π, [N, K+2] each. The ids decide whether the sampled token is in the top K or has its own
    bucket, even if it is as probable as the K-th."""
    assert b.behavior_top_k_log_prob is not None and b.top_k_log_prob is not None
    assert b.token is not None and b.top_k is not None
    mu, pi = b.behavior_top_k_log_prob.to(log_p.dtype), b.top_k_log_prob.detach().to(log_q.dtype)
    inside = (b.top_k == b.token[:, None]).any(1)
    return _buckets(inside, log_p, mu), _buckets(inside, log_q, pi)


def _buckets(inside: Tensor, log_prob: Tensor, top_k: Tensor) -> Tensor:
    """[N, K+2] probabilities: the behavior top K, the sampled token if it is not among them (else 0), all others."""
    top = top_k.exp()
    sampled = torch.where(inside, torch.zeros_like(log_prob), log_prob.exp())
    rest = (1 - top.sum(1) - sampled).clamp(min=0)
    return torch.cat([top, sampled[:, None], rest[:, None]], dim=1)


def top_k_tv(p: Tensor, q: Tensor) -> Tensor:
    """½ Σ |q − p| over buckets [N, K+2]: [N] in [0, 1], between `binary_tv` and the total variation over the
    vocabulary."""
    return 0.5 * (q - p).abs().sum(1)


def top_k_kl(p: Tensor, q: Tensor) -> Tensor:
    """Σ p log(p / q) over buckets [N, K+2]: [N], nats. An empty bucket of p adds 0; q is at least 1e-12."""
    kl: Tensor = torch.special.xlogy(p, p) - torch.special.xlogy(p, q.clamp(min=TOP_K_FLOOR))
    return kl.sum(1).clamp(min=0)


TOP_K: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"topk_kl": top_k_kl, "topk_tv": top_k_tv}
