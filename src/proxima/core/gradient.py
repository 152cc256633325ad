"""How much a surrogate lets a token teach, as a function of its ratio: by autograd, so that it cannot drift from the
loss."""

import torch
from torch import Tensor

from proxima.core.loss import Surrogate
from proxima.data import PolicyBatch


def gradient_weight(surrogate: Surrogate, log_prob: Tensor, behavior_log_prob: Tensor, advantage: Tensor) -> Tensor:
    """−(∂loss/∂log π) / A of tokens that stand alone, each a sequence of its own, with the behavior policy as the
    centre.

    Args:
        surrogate: any spec of SURROGATES. Those that need a whole batch (`clip_cov`, `kl_cov`, `m2po`) see all the
            tokens given.
        log_prob, behavior_log_prob: [N] float, nats, ≤ 0. advantage: [N] float, not 0.
    Returns: [N]: 1 is the plain policy gradient, the ratio that of an unclipped surrogate, 0 a token that does not
        teach.
    Raises: ValueError where an advantage is 0, or the surrogate needs more than these (top-k).
    """
    if bool((advantage == 0).any()):
        raise ValueError("gradient_weight: an advantage is 0; the weight is the gradient divided by it.")
    b = alone(log_prob.detach().clone().requires_grad_(), behavior_log_prob, advantage)
    (gradient,) = torch.autograd.grad(surrogate(b).loss.sum(), b.log_prob)
    return -gradient / advantage


def alone(log_prob: Tensor, behavior_log_prob: Tensor, advantage: Tensor) -> PolicyBatch:
    """A batch in which every token is a sequence of its own."""
    edges = torch.arange(len(log_prob) + 1, device=log_prob.device)
    mask = torch.ones_like(log_prob, dtype=torch.bool)
    return PolicyBatch(
        log_prob=log_prob, behavior_log_prob=behavior_log_prob, advantage=advantage, loss_mask=mask, cu_seqlens=edges
    )
