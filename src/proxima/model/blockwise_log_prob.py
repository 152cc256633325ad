"""`token_log_prob` by the operations of torch: on every device, in every dtype, with all of its options."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from proxima.model.kept_tokens import KeptTokens
from proxima.model.logit_rows import row_blocks
from proxima.model.parallel.vocabulary import VocabularyPart


class _BlockwiseLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: Tensor,
        others: Tensor | None,
        kept: KeptTokens | None,
        part: VocabularyPart | None,
        want_entropy: bool,
        entropy_gradient: bool,
        others_gradient: bool,
        chunk: int,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(compute), weight.to(compute)
            b = None if bias is None else bias.to(compute)
            log_z = torch.empty(len(h), dtype=torch.promote_types(compute, torch.float32), device=h.device)
            log_prob = torch.empty_like(log_z)
            kept_z = log_z if kept is None else torch.empty_like(log_z)
            entropy = torch.empty_like(log_z) if want_entropy else log_z.new_zeros(0)
            more = log_z.new_empty(len(h), 0 if others is None else others.shape[1])
            near, far = (target, others) if part is None else part.rows_of(target, others)
            for at in range(0, len(h), chunk):
                span = slice(at, at + chunk)
                blocks = (log_z[span], log_prob[span], near[span, None], entropy[span], kept_z[span])
                for rows, logits in row_blocks(F.linear(h[span], w, b), temperature[span]):
                    block_z, block_log_prob, block_target, block_entropy, block_kept_z = (each[rows] for each in blocks)
                    top = logits.amax(dim=1)
                    logits.sub_(top[:, None])  # before any difference: logits of 400 have an ulp of 3e-5
                    kept_logits = None if kept is None else kept.of(logits, at + rows.start)
                    p = logits.exp()
                    total = p.sum(dim=1)
                    log_total = total.log()
                    kept_total = log_total if kept_logits is None else kept_logits.logsumexp(log_total)
                    block_z.copy_(top + log_total)
                    block_kept_z.copy_(top + kept_total)  # the same tensor where all tokens could be sampled
                    block_log_prob.copy_(logits.gather(1, block_target).squeeze(1) - kept_total)
                    if far is not None:
                        shift = top if part is not None else -log_total
                        more[span][rows] = logits.gather(1, far[span][rows]) + shift[:, None]
                    if want_entropy:  # log Z − Σ p logit; the logits are shifted by their largest
                        mean_logit = p.mul_(logits.masked_fill_(p == 0, 0.0)).sum(dim=1) / total
                        block_entropy.copy_(log_total - mean_logit)
                    del logits, p
            if part is not None:
                own_z = log_z
                log_z, kept_z, log_prob = part.log_prob(log_z, kept_z, log_prob, target)
                entropy = part.entropy(entropy, own_z, log_z) if want_entropy else entropy
                more = more if others is None else part.values_of(others, more) - log_z[:, None]
        ctx.mark_non_differentiable(*[entropy] * (not entropy_gradient), *[more] * (not others_gradient))
        read = entropy if entropy_gradient else log_z.new_zeros(0)
        ids = others if others_gradient else None
        ctx.save_for_backward(hidden, weight, bias, target, temperature, log_z, read, ids, kept_z)
        ctx.chunk, ctx.compute, ctx.kept, ctx.part = chunk, compute, kept, part
        return log_prob, entropy, more

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d log_prob / d logits = 1[y] − p, also of the others;  d H / d logits = −p (log p + H);  all / temperature.

        Where the token was drawn from S, p of its own log_prob is p_S, 0 outside S. With a part of the vocabulary these
        are this rank's columns; the gradient of `hidden` is summed over the parts."""
        hidden, weight, bias, target, temperature, log_z, entropy, others, kept_z = ctx.saved_tensors
        grad_log_prob, grad_entropy, grad_others = grads
        kept: KeptTokens | None = ctx.kept
        part: VocabularyPart | None = ctx.part
        total = grad_log_prob if kept is None else grad_log_prob.masked_fill(kept.given, 0.0)
        total = total if others is None else total + grad_others.sum(1)
        grad_target = grad_log_prob
        if part is not None:
            grad_target = grad_log_prob.where(part.owned(target), 0.0)
            grad_others = grad_others if others is None else grad_others.where(part.owned(others), 0.0)
            target, others = part.rows_of(target, others)
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(ctx.compute), weight.to(ctx.compute)
            b = None if bias is None else bias.to(ctx.compute)
            grad_h = torch.empty_like(hidden)
            grad_w = torch.zeros_like(weight) if ctx.needs_input_grad[1] and not len(h) else None
            grad_b = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
            for at in range(0, len(h), ctx.chunk):
                span = slice(at, at + ctx.chunk)
                d = F.linear(h[span], w, b)  # logits, overwritten block by block with their gradient
                for rows, log_p in row_blocks(d, temperature[span]):
                    log_p.sub_(log_z[span][rows, None])
                    g, g_all = (x[span][rows, None].to(log_p.dtype) for x in (grad_log_prob, total))
                    g_near = g if part is None else grad_target[span][rows, None].to(log_p.dtype)
                    kept_rows = None if kept is None else kept.of(log_p, at + rows.start)
                    if entropy.numel():
                        p = log_p.exp()
                        of_entropy = log_p.add_(entropy[span][rows, None]).mul_(grad_entropy[span][rows, None])
                        d_logits = of_entropy.masked_fill_(p == 0, 0.0).add_(g_all).mul_(p).neg_()
                        del of_entropy, p
                    elif kept is not None and kept.whole and others is None:
                        d_logits = log_p.zero_()
                    else:
                        d_logits = log_p.exp_().mul_(-g_all)
                    if kept_rows is not None:
                        gap = (log_z - kept_z)[span][rows]
                        d_logits[kept_rows.row, kept_rows.ids] -= (kept_rows.values + gap[kept_rows.row]).exp() * g[
                            kept_rows.row, 0
                        ]
                    d_logits.scatter_add_(1, target[span][rows, None], g_near)
                    if others is not None:
                        d_logits.scatter_add_(1, others[span][rows], grad_others[span][rows].to(d_logits.dtype))
                    d_logits.div_(temperature[span][rows, None])
                    if grad_b is not None:
                        grad_b += d_logits.sum(0).to(grad_b.dtype)
                    d[rows] = d_logits
                    del log_p, d_logits
                grad_h[span] = d @ w
                if ctx.needs_input_grad[1]:
                    product = d.T @ h[span]
                    grad_w = product.to(weight.dtype) if grad_w is None else grad_w.add_(product)
                    del product
                del d
        return grad_h if part is None else part.sum(grad_h), grad_w, grad_b, *(None,) * 10


blockwise_log_prob: Any = _BlockwiseLogProb.apply
