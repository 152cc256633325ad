"""The gradient weight of a token as a function of its ratio, by autograd, so that it cannot disagree with the loss."""

import torch
from torch import Tensor

from proxima.core.loss import Surrogate
from proxima.data.policy_batch import PolicyBatch


def gradient_weight(surrogate: Surrogate, log_prob: Tensor, behavior_log_prob: Tensor, advantage: Tensor) -> Tensor:
    """−(∂loss/∂log π) / A, with each token as its own sequence and the behavior policy as the centre.

    Args:
        surrogate: a spec of SURROGATES. Those that depend on the whole batch (`clip_cov`, `kl_cov`, `m2po`) see all the
            tokens given.
        log_prob, behavior_log_prob: [N] float, nats, ≤ 0. advantage: [N] float, not 0.
    Returns: [N]: 1 for the policy gradient, the ratio for an unclipped surrogate, 0 for a masked token.
    Raises: ValueError if an advantage is 0, or the surrogate needs more than these (top-k).
    """
    if bool((advantage == 0).any()):
        raise ValueError("gradient_weight: an advantage is 0; the weight is the gradient divided by it.")
    b = alone(log_prob.detach().clone().requires_grad_(), behavior_log_prob, advantage)
    (gradient,) = torch.autograd.grad(surrogate(b).loss.sum(), b.log_prob)
    return -gradient / advantage.detach()


def alone(log_prob: Tensor, behavior_log_prob: Tensor, advantage: Tensor) -> PolicyBatch:
    """A batch in which every token is its own sequence."""
    return PolicyBatch(
        log_prob=log_prob,
        behavior_log_prob=behavior_log_prob,
        advantage=advantage,
        loss_mask=torch.ones_like(log_prob, dtype=torch.bool),
        cu_seqlens=torch.arange(len(log_prob) + 1, device=log_prob.device),
    )
