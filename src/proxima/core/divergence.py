"""Divergence of the current policy from another at a token, from the log-probs of the sampled token (binary) or of the
top K.

The top-K kinds divide the vocabulary into buckets: each of the behavior policy's K most probable tokens, the sampled
token, and all others.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from proxima.data import require
from proxima.data.policy_batch import PolicyBatch, finite_log_prob

TOP_K_FLOOR = 1e-12  # minimum probability of a bucket under the current policy
REST_FLOOR = 1e-8  # minimum probability of "any other token", so that a log-prob of exactly 0 gives a finite divergence


def binary_tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation of the two-outcome distributions (this token, any other): |q − p|, in [0, 1].

    Args:
        log_p, log_q: [N] nats, of the policy it is measured from (μ) and of the current policy (π).
    Returns: [N]. All functions here keep shape, dtype and device of the inputs.
    Source: DPPO, arXiv 2602.04879.
    """
    return (log_q.exp() - log_p.exp()).abs()


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p‖q) of the two-outcome distributions: p log(p/q) + (1−p) log((1−p)/(1−q)), nats, ≥ 0.

    Args, Returns: as `binary_tv`. 1−p and 1−q are at least 1e-8, which keeps a certain token finite.
    Source: DPPO, arXiv 2602.04879. Differs: verl adds 1e-8 inside the logs of both, TRL clamps probabilities at 1 −
        1e-7 (P4, T19).
    """
    p = log_p.exp()
    rest_p = (-torch.expm1(log_p)).clamp(min=REST_FLOOR)
    rest_q = (-torch.expm1(log_q)).clamp(min=REST_FLOOR)
    return (p * (log_p - log_q) + rest_p * (rest_p.log() - rest_q.log())).clamp(min=0)


def _buckets(inside: Tensor, log_prob: Tensor, top_k: Tensor) -> Tensor:
    """[N, K+2] probabilities: the behavior top K, the sampled token if it is not among them (else 0), all others."""
    top = top_k.exp()
    sampled = torch.where(inside, torch.zeros_like(log_prob), log_prob.exp())
    rest = (1 - top.sum(1) - sampled).clamp(min=0)
    return torch.cat([top, sampled[:, None], rest[:, None]], dim=1)


def _top_k_buckets(b: PolicyBatch, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Buckets under μ and π, [N, K+2] each. The ids decide whether the sampled token is in the top K or has its own
    bucket, even if it is as probable as the K-th."""
    assert b.behavior_top_k_log_prob is not None and b.top_k_log_prob is not None
    assert b.token is not None and b.top_k is not None
    mu = b.behavior_top_k_log_prob.to(log_p.dtype)
    pi = b.top_k_log_prob.detach().to(log_q.dtype)
    inside = (b.top_k == b.token[:, None]).any(1)
    return _buckets(inside, log_p, mu), _buckets(inside, log_q, pi)


def top_k_tv(p: Tensor, q: Tensor) -> Tensor:
    """½ Σ |q − p| over buckets [N, K+2]: [N] in [0, 1], between `binary_tv` and the total variation over the
    vocabulary."""
    return 0.5 * (q - p).abs().sum(1)


def top_k_kl(p: Tensor, q: Tensor) -> Tensor:
    """Σ p log(p / q) over buckets [N, K+2]: [N], nats. An empty bucket of p adds 0; q is at least 1e-12."""
    kl: Tensor = torch.special.xlogy(p, p) - torch.special.xlogy(p, q.clamp(min=TOP_K_FLOOR))
    return kl.sum(1).clamp(min=0)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary_kl": binary_kl,
    "binary_tv": binary_tv,
    "topk_kl": top_k_kl,
    "topk_tv": top_k_tv,
}
TOP_K_NEEDS = frozenset({"behavior_top_k_log_prob", "token", "top_k", "top_k_log_prob"})


def divergence_needs(kind: str, centre: str) -> frozenset[str]:
    """The fields of the batch that the divergence reads. Raises FieldError for an impossible combination."""
    require(kind in DIVERGENCES, "divergence", kind, f"must be one of {', '.join(sorted(DIVERGENCES))}")
    require(centre in ("behavior", "proximal"), "centre", centre, "must be behavior or proximal")
    if not kind.startswith("topk"):
        return frozenset({f"{centre}_log_prob"})
    bound = f"must be behavior for {kind}: only the engine has top-k log-probs"
    require(centre == "behavior", "centre", centre, bound)
    return TOP_K_NEEDS | {"behavior_log_prob"}


@torch.no_grad()
def divergence(b: PolicyBatch, kind: str, centre: str = "behavior") -> Tensor:
    """[N] detached: the divergence `kind` of π from the `centre` policy at each sampled token, in the loss or not; 0
    elsewhere. In the dtype of the log-probs."""
    other = b.behavior_log_prob if centre == "behavior" else b.proximal_log_prob
    assert other is not None and b.sampled is not None
    log_p = _of_sampled(b, other)
    log_q = _of_sampled(b, b.log_prob)
    if kind.startswith("topk"):
        if b.top_k_divergence is not None:
            return torch.where(b.sampled, b.top_k_divergence, 0.0)
        log_p, log_q = _top_k_buckets(b, log_p, log_q)
    return torch.where(b.sampled, DIVERGENCES[kind](log_p, log_q), 0.0)


def _of_sampled(b: PolicyBatch, log_prob: Tensor) -> Tensor:
    """[N] detached, in the dtype of the policy's log-probs; 0 for tokens that no policy sampled."""
    assert b.sampled is not None
    return finite_log_prob(torch.where(b.sampled, log_prob.detach().to(b.log_prob.dtype), 0.0))
