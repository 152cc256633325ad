"""How far the current policy is from another one at a token, from the two log-probs of the sampled token (binary) or of the top K."""

from collections.abc import Callable

import torch
from torch import Tensor

from proxima.data import PolicyBatch

REST_FLOOR = 1e-8  # least probability of "any other token": a log-prob of exactly 0 must not give an infinite divergence


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
    Source: DPPO, arXiv 2602.04879. Differs: verl adds 1e-8 inside the logs of both, TRL clamps probabilities at 1 − 1e-7 (P4, T19).
    """
    p = log_p.exp()
    rest_p = (-torch.expm1(log_p)).clamp(min=REST_FLOOR)
    rest_q = (-torch.expm1(log_q)).clamp(min=REST_FLOOR)
    return (p * (log_p - log_q) + rest_p * (rest_p.log() - rest_q.log())).clamp(min=0)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"binary_kl": binary_kl, "binary_tv": binary_tv}


@torch.no_grad()
def divergence(b: PolicyBatch, kind: str, centre: str = "behavior") -> Tensor:
    """[N] detached: the divergence `kind` of π from the `centre` policy ("behavior" or "proximal") at each sampled token, 0 elsewhere.

    Computed in the dtype of the log-probs (float32 or float64). Tokens outside the loss but sampled are included: their drift counts.
    """
    other = b.behavior_log_prob if centre == "behavior" else b.proximal_log_prob
    assert other is not None and b.sampled is not None
    zero = torch.zeros((), dtype=b.log_prob.dtype, device=b.log_prob.device)
    log_p, log_q = torch.where(b.sampled, other, zero), torch.where(b.sampled, b.log_prob.detach(), zero)
    return DIVERGENCES[kind](log_p.to(log_q.dtype), log_q)
