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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxima.data.packed_batch import PackedBatch
from proxima.kernels.train_pass import LANES
from proxima.model.blockwise_log_prob import blockwise_log_prob
from proxima.model.fused_log_prob import fused_log_prob
from proxima.model.kept_tokens import KeptTokens
from proxima.model.parallel.vocabulary import VocabularyPart


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
    kept: KeptTokens | None = None,
    part: VocabularyPart | None = None,
    chunk: int = 512,
) -> TokenLogProbs:
    """Chunked, fused log-softmax and gather; the backward pass recomputes the logits.

    Args:
        hidden: [N, D], states that predict the targets.
        weight, bias: [V, D], [V], the output head.
        target: [N] int64, token ids.
        temperature: scalar or [N] float, > 0; logits are divided by it.
        entropy: also return the entropy; with gradient only if `entropy_gradient`, which costs time in the backward.
        others: [N, K] int64, more token ids whose log-probs to return, with gradient only if `others_gradient`.
        kept: the set S_n of tokens that each target was drawn from, the target among them; None: from the vocabulary.
            `log_prob` is then of the distribution over S_n; entropy and others stay those of the whole vocabulary.
        part: weight and bias are this rank's rows of a head that several ranks share. All of them pass the same other
            arguments and get the same values and gradients, except those of weight and bias, which are of their own
            rows. None: the head is whole.
        chunk: rows of logits alive at once; memory is about chunk x V values of the product's dtype.

    Returns: log_prob [N] float32, nats; entropy [N] float32, nats, or None; of the others [N, K] float32, nats, or
        None.

    The matrix products run in the dtype of autocast (or of `hidden`); everything after them in float32 (float64 for
    float64 input).
    Edge cases: N = 0 gives empty outputs with gradients of zero. Rows are independent, so the chunk changes no value.
    """
    if not isinstance(temperature, Tensor):
        exact = torch.promote_types(hidden.dtype, torch.float32)
        temperature = torch.full(hidden.shape[:1], float(temperature), dtype=exact, device=hidden.device)
    kind = hidden.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    settings = (entropy or entropy_gradient, entropy_gradient, others_gradient, chunk, compute)
    if part is not None and kept is not None:
        kept = part.kept(kept)
    whole = compute == torch.bfloat16 and all(each is None for each in (bias, others, kept, part))
    single = {hidden.dtype, weight.dtype, temperature.dtype} == {torch.float32}
    suits = single and kind == "cpu" and len(hidden) > 0 and weight.shape[1] % LANES == 0
    args = (hidden, weight, target, temperature, *settings[:2], chunk)
    if whole and suits and (fused := fused_log_prob(*args)) is not None:
        return TokenLogProbs(fused[0], fused[1] if settings[0] else None, None)

    log_prob, ent, more = blockwise_log_prob(hidden, weight, bias, target, temperature, others, kept, part, *settings)
    return TokenLogProbs(log_prob, ent if settings[0] else None, None if others is None else more)


def sampled_log_prob(batch: PackedBatch, hidden: Tensor, *, others: Tensor | None, **settings: Any) -> TokenLogProbs:
    """`token_log_prob` of the batch's targets, with the output head run only for the `sampled` ones: all values of the
    others, which no loss or metric reads, are 0. For a batch without a sampled token one row is run, so that every rank
    joins the passes of a sharded head."""
    count = max(1, sum(batch.sampled_of))
    rows = torch.argsort((~batch.sampled).long(), stable=True)[:count]  # `nonzero` would wait for the device
    settings |= {"target": batch.target[rows], "temperature": batch.temperature[rows]}
    others = None if others is None else others[rows]
    log_probs = token_log_prob(hidden.index_select(0, rows), others=others, **settings)

    def spread(own: Tensor) -> Tensor:
        return own.new_zeros(len(hidden), *own.shape[1:]).index_copy(0, rows, own)

    entropy, more = (None if own is None else spread(own) for own in log_probs[1:])
    return TokenLogProbs(spread(log_probs.log_prob), entropy, more)
