"""How far the current policy is from another one at a token, from the two log-probs of the sampled token (binary) or of
the top K.

The top-K kinds sort the vocabulary into buckets: each of the behavior policy's K most probable tokens, the sampled
token, everything else.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from proxima.data import PolicyBatch, require

TOP_K_FLOOR = 1e-12  # least probability of a bucket under the current policy
REST_FLOOR = (
    1e-8  # least probability of "any other token": a log-prob of exactly 0 must not give an infinite divergence
)


def binary_tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation of the two-outcome distributions (this token, any other): |q − p|, in [0, 1].

    Args:
        log_p: [N] nats, the policy it is measured from (μ).
        log_q: [N] nats, the current policy (π).
    Returns: [N]. The functions of this file are symmetric in shape, dtype and device: all are those of the inputs.
    Source: DPPO, arXiv 2602.04879.
    """
    return (log_q.exp() - log_p.exp()).abs()


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p‖q) of the two-outcome distributions: p log(p/q) + (1−p) log((1−p)/(1−q)), nats, ≥ 0.

    Args, Returns: as `binary_tv`. 1−p and 1−q are at least 1e-8, so that a certain token stays finite.
    Source: DPPO, arXiv 2602.04879. Differs: verl adds 1e-8 inside the logs of both, TRL clamps probabilities at 1 −
        1e-7 (P4, T19).
    """
    p = log_p.exp()
    rest_p = (-torch.expm1(log_p)).clamp(min=REST_FLOOR)
    rest_q = (-torch.expm1(log_q)).clamp(min=REST_FLOOR)
    return (p * (log_p - log_q) + rest_p * (rest_p.log() - rest_q.log())).clamp(min=0)


def _buckets(inside: Tensor, log_prob: Tensor, top_k: Tensor) -> Tensor:
    """[N, K+2] probabilities: the behavior top K, the sampled token where it is not among them (else 0), and everything
    else."""
    top = top_k.exp()
    own = torch.where(inside, torch.zeros_like(log_prob), log_prob.exp())
    rest = (1 - top.sum(1) - own).clamp(min=0)
    return torch.cat([top, own[:, None], rest[:, None]], dim=1)


def _top_k_buckets(b: PolicyBatch, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Buckets under μ and π, [N, K+2] each.

    The sampled token is one of the top K exactly if its own log-prob is not below theirs, so no token ids are needed.
    """
    assert b.behavior_top_k_log_prob is not None and b.top_k_log_prob is not None and b.sampled is not None
    sampled = b.sampled[:, None]
    floor = torch.full((), -1e9, dtype=log_p.dtype, device=log_p.device)
    mu = torch.where(sampled, b.behavior_top_k_log_prob.to(log_p.dtype), floor)
    pi = torch.where(sampled, b.top_k_log_prob.detach().to(log_q.dtype), floor)
    inside = log_p >= mu.amin(1) - 1e-6 if mu.shape[1] else torch.zeros_like(b.sampled)
    return _buckets(inside, log_p, mu), _buckets(inside, log_q, pi)


def top_k_tv(p: Tensor, q: Tensor) -> Tensor:
    """½ Σ |q − p| over buckets [N, K+2], in [0, 1]; [N]. At least `binary_tv`, at most the total variation over the
    vocabulary."""
    return 0.5 * (q - p).abs().sum(1)


def top_k_kl(p: Tensor, q: Tensor) -> Tensor:
    """Σ p log(p / q) over buckets [N, K+2], nats; [N]. An empty bucket of p adds 0; q is at least 1e-12."""
    kl: Tensor = torch.special.xlogy(p, p) - torch.special.xlogy(p, q.clamp(min=TOP_K_FLOOR))
    return kl.sum(1).clamp(min=0)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary_kl": binary_kl,
    "binary_tv": binary_tv,
    "topk_kl": top_k_kl,
    "topk_tv": top_k_tv,
}
TOP_K_NEEDS = frozenset({"behavior_top_k_log_prob", "top_k_log_prob"})


def divergence_needs(kind: str, centre: str) -> frozenset[str]:
    """What the divergence `kind` reads from the batch. Raises ValueError where there can be no such divergence."""
    require(kind in DIVERGENCES, "divergence", kind, f"must be one of {', '.join(sorted(DIVERGENCES))}")
    require(centre in ("behavior", "proximal"), "centre", centre, "must be behavior or proximal")
    top_k = kind.startswith("topk")
    require(
        not top_k or centre == "behavior",
        "centre",
        centre,
        f"must be behavior for {kind}: only the engine has top-k log-probs",
    )
    return frozenset({f"{centre}_log_prob"}) | (TOP_K_NEEDS if top_k else frozenset())


@torch.no_grad()
def divergence(b: PolicyBatch, kind: str, centre: str = "behavior") -> Tensor:
    """[N] detached: the divergence `kind` of π from the `centre` policy ("behavior" or "proximal") at each sampled
    token, 0 elsewhere.

    Computed in the dtype of the log-probs (float32 or float64). Tokens outside the loss but sampled are included: their
    drift counts.
    """
    other = b.behavior_log_prob if centre == "behavior" else b.proximal_log_prob
    assert other is not None and b.sampled is not None
    zero = torch.zeros((), dtype=b.log_prob.dtype, device=b.log_prob.device)
    log_p, log_q = torch.where(b.sampled, other.to(zero.dtype), zero), torch.where(b.sampled, b.log_prob.detach(), zero)
    if kind.startswith("topk"):
        log_p, log_q = _top_k_buckets(b, log_p, log_q)
    return torch.where(b.sampled, DIVERGENCES[kind](log_p, log_q), zero)
