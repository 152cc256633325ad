"""`token_log_prob` of the whole vocabulary on a CPU, in bf16 on float32 weights: one pass over the logits each way."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from proxima.kernels.train_pass import LANES, TrainKernels, train_kernels

COLUMNS = 128  # blocks of the vocabulary in a backward pass are multiples of this many tokens


def fused_log_prob(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: Tensor, entropy: bool, gradient: bool, chunk: int
) -> tuple[Tensor, Tensor] | None:
    """Log-probs and entropies, [N] float32 each, the latter empty unless wanted; None if the machine has no kernels.
    N > 0, inputs are float32, and the width of `weight` is a multiple of `LANES`.

    Raises:
        IndexError: a target is not a row of `weight`; kernels would read out of bounds.
    """
    kernels = train_kernels()
    if kernels is None:
        return None
    least, most = (int(end) for end in target.aminmax())
    if least < 0 or most >= len(weight):
        raise IndexError(f"target {least if least < 0 else most} is not a token of a vocabulary of {len(weight)}")
    apply: Any = _FusedLogProb.apply
    columns = target.long().contiguous(), temperature.contiguous()
    result: tuple[Tensor, Tensor] = apply(hidden.contiguous(), weight, *columns, entropy, gradient, chunk, kernels)
    return result


class _FusedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, temperature: Tensor, want_entropy: bool,
        entropy_gradient: bool, chunk: int, kernels: TrainKernels,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        h, w, vocabulary = hidden.bfloat16(), _whole_lanes(weight), len(weight)
        log_z, log_prob = torch.empty_like(temperature), torch.empty_like(temperature)
        entropy = torch.empty_like(temperature) if want_entropy else temperature.new_empty(0)
        ctx.logits = None
        for at in range(0, len(h), chunk):
            span = slice(at, at + chunk)
            results = (log_z[span], log_prob[span], entropy[span] if want_entropy else None)
            logits = _logits(h[span], w, vocabulary)
            kernels.log_prob(logits, temperature[span], target[span], *results)
            if len(h) <= chunk and any(ctx.needs_input_grad):  # the backward pass would compute the same ones
                ctx.logits = logits
            del logits
        ctx.save_for_backward(h, w, target, temperature, log_z, entropy if entropy_gradient else None)
        ctx.chunk, ctx.kernels, ctx.vocabulary = chunk, kernels, vocabulary
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Over blocks of the vocabulary rather than of rows, so that no gradient of the head is added to another."""
        h, w, target, temperature, log_z, entropy = ctx.saved_tensors
        kernels: TrainKernels = ctx.kernels
        grad_h, grad_w = torch.zeros(h.shape), torch.empty(w.shape) if ctx.needs_input_grad[1] else None
        of_entropy = (entropy, None if entropy is None else grad_entropy.contiguous())
        turned, grad = kernels.transposed(h), grad.contiguous()
        logits, ctx.logits = ctx.logits, None  # overwritten by their gradient: a second pass computes them again
        block = max(1, ctx.chunk * len(w) // len(h) // COLUMNS) * COLUMNS
        for first in range(0, len(w), block):
            block_weight = w[first : first + block]
            if logits is None:
                d = _logits(h, block_weight, ctx.vocabulary - first)
            else:
                d = logits[:, first : first + block].contiguous()
            kernels.log_prob_backward(d, temperature, target, log_z, grad, *of_entropy, first)
            grad_h.add_(d @ block_weight)
            if grad_w is not None:  # as [D, V]: a product that reads a transposed d takes twice as long
                kernels.transposed(turned @ d, grad_w[first : first + block])
        return grad_h, None if grad_w is None else grad_w[: ctx.vocabulary], *(None,) * 6


def _whole_lanes(weight: Tensor) -> Tensor:
    """The head in bf16, with rows of 0 up to a multiple of LANES tokens, as kernels read the logits."""
    whole = weight.new_empty(-(-len(weight) // LANES) * LANES, weight.shape[1], dtype=torch.bfloat16)
    whole[: len(weight)], whole[len(weight) :] = weight, 0
    return whole


def _logits(hidden: Tensor, weight: Tensor, vocabulary: int) -> Tensor:
    """[n, W] of [n, D] and [W, D], -inf for those beyond the vocabulary: they have no probability and no gradient."""
    logits = F.linear(hidden, weight)
    logits[:, vocabulary:] = -torch.inf
    return logits
