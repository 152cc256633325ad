"""Log-probs of given tokens, and entropies, from hidden states, without materializing `[N, vocabulary]`.

logits_n = h_n Wᵀ (+ b) / temperature_n     log_prob_n = logits_n[y_n] − logsumexp(logits_n)
H_n = logsumexp(logits_n) − Σ_v p_v logits_v

Where sampling was truncated to a set S_n of tokens, log_prob_n = logits_n[y_n] − logsumexp_{v ∈ S_n} logits_n[v]: the
log-prob of the distribution that the token was drawn from, π(y) / π(S). S_n is a constant: no gradient goes through it.
The entropy stays that of the whole vocabulary.

**Which log-probs are over S.** All that are compared with one another at the sampled token: the policy's at the update,
the proximal policy's, and the reference's. With samples from π_S, KL estimates are valid only for distributions over S:
E[ref_S / π_S] = 1 makes k3 an estimate of KL(π_S ‖ ref_S), which is 0 where the two agree. With an untruncated
reference every token would cost −log ref(S) more, for any policy, and k3 would be biased by E[ref / π_S] = ref(S); with
both untruncated, the part of the KL from tokens outside S is missing. So no KL of these samples constrains the policy
on tokens that are never sampled: which these are is up to `top_p`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from proxima.data.packed_batch import PackedBatch
from proxima.kernels.train_pass import LANES
from proxima.model.compilation import compiled
from proxima.model.fused import fused_log_prob
from proxima.model.masked_logits import PackedSamplingMask
from proxima.model.parallel.tensor import VocabularyPart

ROWS = 8  # rows of logits processed at once after the product: they stay in the cache
ROWS_ON_CPU, FEWEST_ROWS, MOST_ROWS = 512, 2048, 8192  # of a chunk; on a GPU by its memory
LOGIT = 10  # bytes on a GPU: in the products' 16 bits, in float32, and its exponential
SHARE = 16  # of a GPU's memory, of which the logits of a chunk take one part


def rows_of_logits(memory: int, vocabulary: int) -> int:
    """The rows of logits that are alive at once on a GPU with `memory` bytes: the largest power of two whose logits
    take at most 1 / `SHARE` of it, but at least `FEWEST_ROWS` and at most `MOST_ROWS`.

    Each chunk reads the head's weights, and reads and writes their gradient: with 512 rows a GPU waits for memory as
    long as it computes. `memory` is what the device has, not what is free: so a resumed run, and every rank, computes
    in the same chunks.
    """
    rows = MOST_ROWS
    while rows > FEWEST_ROWS and rows * vocabulary * LOGIT * SHARE > memory:
        rows //= 2
    return rows


def rows_on(device: torch.device, vocabulary: int) -> int:
    """`rows_of_logits` of a device; on a CPU always `ROWS_ON_CPU`, on an accelerator of another kind the fewest."""
    if device.type == "cuda":
        return rows_of_logits(torch.cuda.get_device_properties(device).total_memory, vocabulary)
    if device.type in ("cpu", "meta"):
        return ROWS_ON_CPU
    return FEWEST_ROWS


class TokenLogProbs(NamedTuple):
    """The result of `token_log_prob`."""

    log_prob: Tensor
    entropy: Tensor | None
    others: Tensor | None


def token_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    bias: Tensor | None = None,
    entropy: bool = False,
    entropy_gradient: bool = False,
    others: Tensor | None = None,
    others_gradient: bool = False,
    mask: PackedSamplingMask | None = None,
    part: VocabularyPart | None = None,
    chunk: int = ROWS_ON_CPU,
    fused: bool = False,
) -> TokenLogProbs:
    """Chunked, fused log-softmax and gather; the backward pass recomputes the logits.

    Args:
        hidden: [N, D], states that predict the targets.
        weight, bias: [V, D], [V], the output head.
        target: [N] int64, token ids.
        temperature: scalar or [N] float, > 0; logits are divided by it.
        entropy: also return the entropy; with gradient only if `entropy_gradient`, which costs time in the backward.
        others: [N, K] int64, more token ids whose log-probs to return, with gradient only if `others_gradient`.
        mask: the set S_n of tokens that each target was drawn from, the target among them; None: from the vocabulary.
            `log_prob` is then of the distribution over S_n; entropy and others stay those of the whole vocabulary.
        part: weight and bias are this rank's rows of a head that several ranks share. All of them pass the same other
            arguments and get the same values and gradients, except those of weight and bias, which are of their own
            rows. None: the head is whole.
        chunk: rows of logits alive at once; memory is about chunk x V values of the product's dtype.
        fused: compile what comes between the products: a kernel then reads the logits in their dtype and writes as
            much, or nothing, where single operations read and write 38 bytes of a logit forward and 52 backward. No
            effect with a `mask`.

    Returns: log_prob [N] float32, nats; entropy [N] float32, nats, or None; of the others [N, K] float32, nats, or
        None.

    The matrix products run in the dtype of autocast (or of `hidden`); everything after them in float32 (float64 for
    float64 input).
    Edge cases: N = 0 gives empty outputs with gradients of zero. Rows are independent, so the chunk changes no value.
    """
    if not isinstance(temperature, Tensor):
        exact = torch.promote_types(hidden.dtype, torch.float32)
        temperature = torch.full(hidden.shape[:1], float(temperature), dtype=exact, device=hidden.device)
    want_entropy = entropy or entropy_gradient
    compute = _product_dtype(hidden)
    if part is not None and mask is not None:
        mask = part.local_mask(mask)

    plain = all(each is None for each in (bias, others, mask, part))
    if plain and _suits_kernels(hidden, weight, temperature, compute):
        values = fused_log_prob(hidden, weight, target, temperature, want_entropy, entropy_gradient, chunk)
        if values is not None:
            log_prob, entropies = values
            return TokenLogProbs(log_prob, entropies if want_entropy else None, None)

    log_prob, entropies, more = blockwise_log_prob(
        hidden, weight, bias, target, temperature, others, mask, part,
        want_entropy, entropy_gradient, others_gradient, chunk, compute, fused,
    )  # fmt: skip
    wanted_entropy = entropies if want_entropy else None
    of_others = None if others is None else more
    return TokenLogProbs(log_prob, wanted_entropy, of_others)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which hidden states are multiplied with the head: that of autocast, or their own."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _cast(
    dtype: torch.dtype, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias of the head in the dtype of their product."""
    if bias is not None:
        bias = bias.to(dtype)
    return hidden.to(dtype), weight.to(dtype), bias


def _suits_kernels(hidden: Tensor, weight: Tensor, temperature: Tensor, compute: torch.dtype) -> bool:
    """True for inputs that `fused_log_prob` takes."""
    if hidden.device.type != "cpu" or compute != torch.bfloat16:
        return False
    if {hidden.dtype, weight.dtype, temperature.dtype} != {torch.float32}:
        return False
    return len(hidden) > 0 and weight.shape[1] % LANES == 0


def sampled_log_prob(batch: PackedBatch, hidden: Tensor, *, others: Tensor | None, **settings: Any) -> TokenLogProbs:
    """`token_log_prob` of the batch's targets, with the output head run only for the `sampled` ones and those with an
    `echo`: all values of the others, which no loss or metric reads, are 0. For a batch without such a token one row is
    run, so that every rank joins the passes of a sharded head."""
    count = max(1, sum(batch.sampled_of) + batch.echo_tokens)
    read = batch.sampled
    if batch.echo is not None:
        read = read | (batch.echo > 0)
    rows = torch.argsort((~read).long(), stable=True)[:count]  # `nonzero` would wait for the device
    settings |= {"target": batch.target[rows], "temperature": batch.temperature[rows]}
    if others is not None:
        others = others[rows]
    found = token_log_prob(hidden.index_select(0, rows), others=others, **settings)

    def spread(own: Tensor) -> Tensor:
        return own.new_zeros(len(hidden), *own.shape[1:]).index_copy(0, rows, own)

    log_prob = spread(found.log_prob)
    entropy = None if found.entropy is None else spread(found.entropy)
    of_others = None if found.others is None else spread(found.others)
    return TokenLogProbs(log_prob, entropy, of_others)


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
        mask: PackedSamplingMask | None,
        part: VocabularyPart | None,
        want_entropy: bool,
        entropy_gradient: bool,
        others_gradient: bool,
        chunk: int,
        compute: torch.dtype,
        fused: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        fused = fused and mask is None
        measure = compiled(_measured) if fused else _measured
        with torch.autocast(hidden.device.type, enabled=False):
            h, w, b = _cast(compute, hidden, weight, bias)
            exact = torch.promote_types(compute, torch.float32)
            log_z = torch.empty(len(h), dtype=exact, device=h.device)
            log_prob = torch.empty_like(log_z)
            masked_z = log_z if mask is None else torch.empty_like(log_z)
            entropy = torch.empty_like(log_z) if want_entropy else log_z.new_zeros(0)
            others_count = 0 if others is None else others.shape[1]
            more = log_z.new_empty(len(h), others_count)
            near = target
            far = others
            if part is not None:
                near, far = part.rows_of(target, others)
            for at in range(0, len(h), chunk):
                logits = F.linear(h[at : at + chunk], w, b)
                for rows in _blocks(logits, at, fused):
                    block = logits[rows.start - at : rows.stop - at]
                    sets = None if mask is None else (mask, rows.start)
                    ids = None if far is None else far[rows]
                    values = measure(block, temperature[rows], near[rows], ids, sets, want_entropy, part is None)
                    for column, value in zip((log_z, masked_z, log_prob, entropy, more), values, strict=True):
                        if value is not None:
                            column[rows] = value
                    del block, values, value
                del logits
            if part is not None:
                own_z = log_z
                log_z, masked_z, log_prob = part.log_prob(log_z, masked_z, log_prob, target)
                if want_entropy:
                    entropy = part.entropy(entropy, own_z, log_z)
                if others is not None:
                    more = part.values_of(others, more) - log_z[:, None]
        constants = []
        if not entropy_gradient:
            constants.append(entropy)
        if not others_gradient:
            constants.append(more)
        ctx.mark_non_differentiable(*constants)  # a second call would replace the first
        read = entropy if entropy_gradient else log_z.new_zeros(0)
        ids = others if others_gradient else None
        ctx.save_for_backward(hidden, weight, bias, target, temperature, log_z, read, ids, masked_z)
        ctx.chunk = chunk
        ctx.compute = compute
        ctx.mask = mask
        ctx.part = part
        ctx.fused = fused
        return log_prob, entropy, more

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d log_prob / d logits = 1[y] − p, also of the others;  d H / d logits = −p (log p + H);  all / temperature.

        Where the token was drawn from S, p of its own log_prob is p_S, 0 outside S. With a part of the vocabulary these
        are this rank's columns; the gradient of `hidden` is summed over the parts."""
        hidden, weight, bias, target, temperature, log_z, entropy, others, masked_z = ctx.saved_tensors
        grad_log_prob, grad_entropy, grad_others = grads
        mask: PackedSamplingMask | None = ctx.mask
        part: VocabularyPart | None = ctx.part
        total = grad_log_prob
        if mask is not None:
            total = total.masked_fill(mask.present, 0.0)
        if others is not None:
            total = total + grad_others.sum(1)
        grad_target = grad_log_prob
        if part is not None:
            grad_target = grad_log_prob.where(part.owned(target), 0.0)
            if others is not None:
                grad_others = grad_others.where(part.owned(others), 0.0)
            target, others = part.rows_of(target, others)
        columns = _HeadRows(
            temperature, log_z, target, grad_target, total, entropy, grad_entropy, others, grad_others, ctx.fused
        )
        differentiate = compiled(_differentiated) if ctx.fused else _differentiated
        with torch.autocast(hidden.device.type, enabled=False):
            h, w, b = _cast(ctx.compute, hidden, weight, bias)
            grad_h = torch.empty_like(hidden)
            grad_w = None
            if ctx.needs_input_grad[1] and not len(h):
                grad_w = torch.zeros_like(weight)
            # sums over chunks are in float32 at least, also where the weights are in bfloat16
            exact = torch.promote_types(weight.dtype, torch.float32)
            several = len(h) > ctx.chunk
            sum_dtype = exact if several else weight.dtype
            grad_b = None
            if bias is not None and ctx.needs_input_grad[2]:
                grad_b = torch.zeros_like(bias, dtype=exact)
            for at in range(0, len(h), ctx.chunk):
                span = slice(at, at + ctx.chunk)
                d = F.linear(h[span], w, b)  # logits, overwritten block by block with their gradient
                for rows in _blocks(d, at, ctx.fused):
                    block = d[rows.start - at : rows.stop - at]
                    sets = None
                    if mask is not None:
                        sets = (mask, rows.start, (log_z - masked_z)[rows], grad_log_prob[rows])
                    of_bias = differentiate(block, columns.of(rows), sets, grad_b is not None)
                    if grad_b is not None and of_bias is not None:
                        grad_b += of_bias
                    del block
                grad_h[span] = d @ w
                if ctx.needs_input_grad[1]:
                    product = d.T @ h[span]
                    if grad_w is None:
                        grad_w = product.to(sum_dtype)
                    else:
                        grad_w.add_(product)
                    del product
                del d
            if grad_w is not None:
                grad_w = grad_w.to(weight.dtype)
            if grad_b is not None:
                grad_b = grad_b.to(bias.dtype)
        if part is not None:
            grad_h = part.sum(grad_h)
        of_the_rest = (None,) * 11  # targets, temperature and settings
        return grad_h, grad_w, grad_b, *of_the_rest


class _HeadRows(NamedTuple):
    """What `_differentiated` reads beside the logits, a row for each of theirs; `grad_target`, `grad_all`: of the
    target's logit and of all logits. `in_one_pass`: the target is found by comparing, not by an index."""

    temperature: Tensor
    log_z: Tensor
    target: Tensor
    grad_target: Tensor
    grad_all: Tensor
    entropy: Tensor
    grad_entropy: Tensor
    others: Tensor | None
    grad_others: Tensor
    in_one_pass: bool

    def of(self, rows: slice) -> "_HeadRows":
        columns: dict[str, Any] = self._asdict()
        for name, value in columns.items():
            if isinstance(value, Tensor):
                columns[name] = value[rows]
        return _HeadRows(**columns)


def _measured(
    logits: Tensor,
    temperature: Tensor,
    target: Tensor,
    others: Tensor | None,
    sets: tuple[PackedSamplingMask, int] | None,
    want_entropy: bool,
    whole: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Of rows of logits [R, V]: log Z, that over the sets, log-probs, entropies, and those of the other tokens, which
    without the `whole` vocabulary are logits."""
    logits = _exact(logits, temperature)
    top = logits.amax(dim=1)
    logits.sub_(top[:, None])  # before any difference: logits of 400 have an ulp of 3e-5
    p = logits.exp()
    total = p.sum(dim=1)
    log_total = total.log()
    masked_total = log_total
    masked_z = None  # log Z, where all tokens could be sampled
    if sets is not None:
        mask, start = sets
        masked_total = mask.of(logits, start).logsumexp(log_total)
        masked_z = top + masked_total
    log_prob = logits.gather(1, target[:, None]).squeeze(1) - masked_total
    more = None
    if others is not None:
        shift = -log_total if whole else top
        more = logits.gather(1, others) + shift[:, None]
    entropy = None
    if want_entropy:  # log Z − Σ p logit; the logits are shifted by their largest
        mean_logit = p.mul_(logits.masked_fill_(p == 0, 0.0)).sum(dim=1) / total
        entropy = log_total - mean_logit
    return top + log_total, masked_z, log_prob, entropy, more


def _differentiated(
    logits: Tensor, columns: _HeadRows, sets: tuple[PackedSamplingMask, int, Tensor, Tensor] | None, with_sum: bool
) -> Tensor | None:
    """Overwrite rows of logits [R, V] with their gradient; return its sum over the rows, unrounded, `with_sum`."""
    log_p = _exact(logits, columns.temperature).sub_(columns.log_z[:, None])
    g_all = columns.grad_all[:, None].to(log_p.dtype)
    g_near = columns.grad_target[:, None].to(log_p.dtype)
    masked = None
    every_row_has_a_set = False
    if sets is not None:
        mask, start, gap, grad_log_prob = sets
        masked = mask.of(log_p, start)
        every_row_has_a_set = mask.complete
    if columns.entropy.numel():
        p = log_p.exp()
        of_entropy = log_p.add_(columns.entropy[:, None]).mul_(columns.grad_entropy[:, None])
        d_logits = of_entropy.masked_fill_(p == 0, 0.0).add_(g_all).mul_(p).neg_()
        del of_entropy, p
    elif every_row_has_a_set and columns.others is None:
        d_logits = log_p.zero_()
    else:
        d_logits = log_p.exp_().mul_(-g_all)
    if masked is not None:
        g = grad_log_prob.to(log_p.dtype)
        p_of_set = (masked.values + gap[masked.row]).exp()
        d_logits[masked.row, masked.ids] -= p_of_set * g[masked.row]
    if columns.in_one_pass:
        ids = torch.arange(d_logits.shape[1], device=d_logits.device)
        d_logits = torch.where(ids == columns.target[:, None], d_logits + g_near, d_logits)
    else:
        d_logits.scatter_add_(1, columns.target[:, None], g_near)
    if columns.others is not None:
        d_logits.scatter_add_(1, columns.others, columns.grad_others.to(d_logits.dtype))
    d_logits = d_logits.div_(columns.temperature[:, None])
    logits.copy_(d_logits)
    return d_logits.sum(0) if with_sum else None


def _blocks(logits: Tensor, start: int, whole: bool) -> Iterator[slice]:
    """The rows, from `start` on, that are processed together: on a CPU `ROWS` of them, so that they stay in the cache,
    unless the `whole` is one call."""
    step = max(1, len(logits))
    if logits.device.type == "cpu" and not whole:
        step = ROWS
    end = start + len(logits)
    for at in range(start, end, step):
        yield slice(at, min(end, at + step))


def _exact(logits: Tensor, temperature: Tensor) -> Tensor:
    """A copy of the logits in float32 (float64 if they are), divided by the temperature."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(exact, copy=True).div_(temperature[:, None])


blockwise_log_prob: Any = _BlockwiseLogProb.apply


class TopTokens(NamedTuple):
    """The result of `top_k_log_prob`: log-probs of the targets [N], ids and log-probs of the top tokens [N, k],
    descending."""

    log_prob: Tensor
    ids: Tensor
    top: Tensor


@torch.no_grad()
def top_k_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    vocabulary: int | None = None,
    part: VocabularyPart | None = None,
    chunk: int = ROWS_ON_CPU,
) -> TopTokens:
    """Log-probs of the targets and of the most probable tokens, float32, nats, without gradient, in one pass.

    Args:
        hidden, weight, bias, target [N], temperature [N], part, chunk: as `token_log_prob`.
        k: tokens, >= 0, at most `vocabulary`.
        vocabulary: only ids below it are considered; the log-probs are still normalised over all rows of `weight`.
    """
    compute = _product_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        h, w, b = _cast(compute, hidden, weight, bias)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        log_z, chosen = torch.empty(2, len(hidden), dtype=exact, device=hidden.device)
        ids = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
        top = torch.full_like(ids, -torch.inf, dtype=exact)
        first = 0
        near = target
        if part is not None:
            first = part.start
            near = part.local(target)
        within = len(weight)
        if vocabulary is not None:
            within = min(max(0, vocabulary - first), within)
        own = min(k, within)  # fewer than k only of a part
        for at in range(0, len(hidden), chunk):
            span = slice(at, at + chunk)
            for rows, logits in row_blocks(F.linear(h[span], w, b), temperature[span]):
                largest = logits[:, :within].topk(own, dim=1)
                ids[span][rows, :own] = largest.indices + first
                top[span][rows, :own] = largest.values
                chosen[span][rows] = logits.gather(1, near[span][rows, None]).squeeze(1)
                log_z[span][rows] = logits.logsumexp(1)
                del logits
        if part is not None:
            log_z = part.logsumexp(log_z)
            chosen = part.values_of(target, chosen)
            top, ids = part.largest(top, ids, k)
    return TopTokens(chosen - log_z, ids, top - log_z[:, None])


@torch.no_grad()
def log_sum_square(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    mask: PackedSamplingMask | None = None,
    part: VocabularyPart | None = None,
    chunk: int = ROWS_ON_CPU,
) -> Tensor:
    """[N] float32 (float64 for float64 input), without gradient: log Σ_v π_v², the log of the probability that two
    draws at a position agree; draws are from `mask` where it is given. Args: as `token_log_prob`, temperature [N]. It
    costs one more product with the head."""
    compute = _product_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        h, w, b = _cast(compute, hidden, weight, bias)
        sums = torch.empty(len(h), dtype=torch.promote_types(compute, torch.float32), device=h.device)
        logs = torch.empty_like(sums)
        if part is not None and mask is not None:
            mask = part.local_mask(mask)
        for at in range(0, len(h), chunk):
            span = slice(at, at + chunk)
            for rows, logits in row_blocks(F.linear(h[span], w, b), temperature[span]):
                square = (2 * logits).logsumexp(1)
                log_z = logits.logsumexp(1)
                if mask is not None:
                    masked = mask.of(logits, at + rows.start)
                    square = masked.logsumexp(square, scale=2.0)
                    log_z = masked.logsumexp(log_z)
                sums[span][rows] = square
                logs[span][rows] = log_z
                del logits
        if part is not None:
            sums = part.logsumexp(sums)
            logs = part.logsumexp(logs)
        return sums - 2 * logs


def row_blocks(logits: Tensor, temperature: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of `logits`, in float32 and divided by the temperature; on a GPU all rows at once. The caller
    deletes each block before it asks for the next."""
    for rows in _blocks(logits, 0, False):
        yield rows, _exact(logits[rows], temperature[rows])
