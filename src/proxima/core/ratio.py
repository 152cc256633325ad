"""The log-ratio and the ratio, computed in one place so that every surrogate clamps alike."""

from torch import Tensor

from proxima.data import PolicyBatch

LOG_RATIO_LIMIT = 20.0


def masked_log_ratio(b: PolicyBatch) -> Tensor:
    """ℓ = log π − log π_prox, [N] nats, with gradient, unclamped; 0 outside the loss mask, whatever lies there."""
    return b.masked("log_prob") - b.masked("proximal_log_prob").detach()


def masked_ratio(b: PolicyBatch) -> Tensor:
    """r = exp(clamp(ℓ, −20, 20)), [N], with gradient; 1 outside the loss mask.

    exp(20) = 4.85e8 is finite in float32; beyond the clamp the gradient is 0.
    """
    return masked_log_ratio(b).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
