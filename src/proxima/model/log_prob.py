"""Log-prob of given tokens, and entropy, from hidden states, without ever holding `[N, vocabulary]`.

logits_n = h_n Wᵀ (+ b) / temperature_n     log_prob_n = logits_n[y_n] − logsumexp(logits_n)     H_n = logsumexp(logits_n) − Σ_v p_v
logits_v
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def token_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    bias: Tensor | None = None,
    entropy: bool = False,
    entropy_gradient: bool = False,
    chunk: int = 256,
) -> tuple[Tensor, Tensor | None]:
    """Chunked, fused log-softmax-gather with its own backward; logits are recomputed there instead of kept.

    Args:
        hidden: [N, D], states that predict the targets.
        weight, bias: [V, D], [V], the output head.
        target: [N] int64, token ids.
        temperature: scalar or [N] float, > 0; logits are divided by it.
        entropy: also return the entropy; with gradient only if `entropy_gradient`, since that makes the backward dearer.
        chunk: rows of logits alive at once; memory is about 3 x chunk x V x 4 bytes.

    Returns: log_prob [N] float32, nats, and entropy [N] float32, nats, or None.

    The matrix products run in the dtype of autocast (or of `hidden`); everything after them in float32 (float64 for float64 input).
    Edge cases: N = 0 gives empty outputs with gradients of zero. Rows are independent, so the chunk changes no value.
    """
    count = hidden.shape[0]
    if not isinstance(temperature, Tensor):
        temperature = torch.full((count,), float(temperature), device=hidden.device)
    compute = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype
    settings = (entropy or entropy_gradient, entropy_gradient, chunk, compute)
    log_prob, ent = _apply(hidden, weight, bias, target, temperature, *settings)
    return log_prob, ent if settings[0] else None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits.div_(temperature[:, None])


class _TokenLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: Tensor,
        want_entropy: bool,
        entropy_gradient: bool,
        chunk: int,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(compute), weight.to(compute)
            b = None if bias is None else bias.to(compute)
            out_dtype = torch.float64 if compute == torch.float64 else torch.float32
            count = h.shape[0]
            log_z = torch.empty(count, dtype=out_dtype, device=h.device)
            log_prob = torch.empty_like(log_z)
            entropy = torch.empty_like(log_z) if want_entropy else log_z.new_zeros(0)
            for at in range(0, count, chunk):
                rows = slice(at, at + chunk)
                logits = _logits(h[rows], w, b, temperature[rows])
                log_z[rows] = logits.logsumexp(dim=1)
                log_prob[rows] = logits.gather(1, target[rows, None]).squeeze(1) - log_z[rows]
                if want_entropy:
                    mean = torch.linalg.vecdot(logits.sub(log_z[rows, None]).exp_(), logits)
                    entropy[rows] = log_z[rows] - mean
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(hidden, weight, bias, target, temperature, log_z, entropy if entropy_gradient else log_z.new_zeros(0))
        ctx.chunk, ctx.compute = chunk, compute
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d log_prob / d logits = 1[y] − p;  d H / d logits = −p (log p + H);  both / temperature."""
        hidden, weight, bias, target, temperature, log_z, entropy = ctx.saved_tensors
        grad_log_prob, grad_entropy = grads
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(ctx.compute), weight.to(ctx.compute)
            b = None if bias is None else bias.to(ctx.compute)
            grad_h = torch.empty_like(hidden)
            grad_w = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
            grad_b = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
            for at in range(0, h.shape[0], ctx.chunk):
                rows = slice(at, at + ctx.chunk)
                log_p = _logits(h[rows], w, b, temperature[rows]).sub_(log_z[rows, None])
                g = grad_log_prob[rows, None]
                if entropy.numel():
                    p = log_p.exp()
                    d_logits = log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(g).mul_(p).neg_()
                else:
                    d_logits = log_p.exp_().mul_(-g)
                d_logits.scatter_add_(1, target[rows, None], g.to(d_logits.dtype))
                d_logits.div_(temperature[rows, None])
                d = d_logits.to(ctx.compute)
                grad_h[rows] = (d @ w).to(grad_h.dtype)
                if grad_w is not None:
                    grad_w += d.T @ h[rows]
                if grad_b is not None:
                    grad_b += d_logits.sum(0).to(grad_b.dtype)
        return grad_h, grad_w, grad_b, None, None, None, None, None, None


_apply: Any = _TokenLogProb.apply
