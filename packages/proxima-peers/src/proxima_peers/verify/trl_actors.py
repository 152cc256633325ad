"""TRL's other online trainers (GMPO, RLOO, DPPO and PPO), and the sampler correction of GRPOTrainer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core.aggregate import SequenceMeanTokenMean, TokenMean
from proxima.core.correction.importance import Importance
from proxima.core.correction.rejection import TopEntropy
from proxima.core.loss import check_needs
from proxima.core.penalty import K3
from proxima.core.ratio import masked_log_ratio, spread
from proxima.core.segment import segment_count, segment_mean
from proxima.core.surrogate.clip import PpoClip
from proxima.core.surrogate.cppo import Dppo
from proxima.core.surrogate.weight import GeoMean
from proxima.core.value import ValueLoss
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.by_hand import as_tensor
from proxima_peers.verify.record import Attempt, Record
from proxima_peers.verify.trl import (
    OPTIONS,
    SAMPLER_RATIO,
    accumulation,
    refuse_more,
    rows_of,
    single_entropy,
    without_tools,
)
from proxima_peers.verify.trl_metrics import dppo_numbers, epsilons, gmpo_numbers, rloo_numbers
from proxima_peers.verify.variants import Changed, beyond_limit, loss_of, masked, reasons


def gmpo(record: Record) -> Iterator[Attempt]:
    """Experimental GMPOTrainer._compute_loss: mean over rows."""
    record = without_tools(record)
    record.inputs.mark_irrelevant("num_items_in_batch")
    p = record.params
    padded = rows_of(record)
    beta = p.get("beta", 0.0)
    share = p.get("top_entropy_quantile", 1.0)
    penalty = K3(beta) if beta else None
    spec: Any = GeoMean(*epsilons(p), "log_ratio")
    steps = accumulation(p)
    metrics = record.checks(gmpo_numbers(record))
    p.mark_irrelevant(*OPTIONS)
    record.inputs.mark_irrelevant("sampling_logp", "sampling_per_token_logps", "reference_logp", *SAMPLER_RATIO)
    aggregate = SequenceMeanTokenMean()
    correction = TopEntropy(share) if share < 1.0 else None
    loss = loss_of(padded.b, spec, aggregate, correction, penalty)
    yield None, [*record.loss_checks(loss.value / steps, padded.leaf), *metrics]
    far = beyond_limit(masked_log_ratio(padded.b))
    # TRL averages over all rows (T1), leaves low entropies out of the geometric mean (T9), and clamps nothing (T4).
    reason = reasons(T1=not bool(padded.mask.any(1).all()), T4=far, T9=correction)
    if reason is None:
        return
    if correction is not None:
        spec = Changed(_geo_mean_of, spec, single_entropy(share, padded.b).weight == 1)
    loss = loss_of(padded.b, spec, aggregate, None, penalty, bounded=not far)
    untouched = -(record.tensor("advantages") * ~padded.mask.any(1)).sum()  # rows without a token have ratio 1
    value = (loss.numerator + untouched) / len(padded.mask) / steps
    yield reason, [*record.loss_checks(value, padded.leaf), *metrics]


def _geo_mean_of(spec: GeoMean, keep: Tensor, b: PolicyBatch) -> Any:
    """The loss with the geometric mean over the tokens `keep` [N], at all tokens of their sequence (T9)."""
    out = spec(replace(b, loss_mask=keep))
    mean = segment_mean(out.loss, keep, b.cu_seqlens)
    nothing = segment_count(keep, b.cu_seqlens) == 0  # without tokens, the ratio is 1
    own = segment_mean(b.masked("advantage"), b.loss_mask, b.cu_seqlens)
    return replace(out, loss=spread(b, torch.where(nothing, -own, mean)))


def rloo(record: Record) -> Iterator[Attempt]:
    """RLOOTrainer._compute_loss: the clip on the sequence's whole ratio, its loss a mean over sequences."""
    p = record.params
    leaf = record.tensor("logp").requires_grad_()
    mask = record.mask
    gap = torch.where(mask, leaf - record.tensor("behavior_logp"), 0.0).sum(1)
    edges = torch.arange(len(mask) + 1)
    rows = {"loss_mask": torch.ones(len(mask), dtype=torch.bool), "advantage": record.tensor("advantages")}
    b = PolicyBatch(log_prob=gap, behavior_log_prob=torch.zeros_like(gap), cu_seqlens=edges, **rows)
    low, high = epsilons(p)
    refuse_more(p)
    p.mark_irrelevant("beta", "training", "current_gradient_accumulation_steps")  # its KL is in the reward
    metrics = record.checks(rloo_numbers(record))
    limits = (False, True) if beyond_limit(gap) else (False,)
    for limit in limits:
        loss = loss_of(b, PpoClip(min(low, 1.0), high), TokenMean(), bounded=not limit)
        yield reasons(T4=limit), [*record.loss_checks(loss.value, leaf), *metrics]


def dppo(record: Record) -> Iterator[Attempt]:
    """TRL 1.3 experimental DPPOTrainer: a capped REINFORCE form, divergence mask, mean over tokens."""
    record = without_tools(record)
    p = record.params
    padded = rows_of(record)
    beta = p.get("beta", 0.0)
    low = p.get("epsilon_low", 0.15)
    high = p.get("epsilon_high", 0.15)
    spec = Dppo(p.get("divergence_type", "binary_tv"), high, low, p.get("clip_ratio_c", 20.0))
    check_needs(spec, padded.b)
    penalty = K3(beta) if beta else None
    p.mark_irrelevant("divergence_topk", "training", "current_gradient_accumulation_steps", "max_completion_length")
    given = record.inputs.get("num_items_in_batch")
    assert padded.b.advantage is not None
    zero = padded.b.loss_mask & (padded.b.advantage == 0)
    variants: list[tuple[str | None, Any]] = [(None, spec)]
    if bool(zero.any()) or _is_beyond_top_k(padded.b):
        variants.append(("T19", Changed(masked, spec, _keep_of_trl(spec, padded.b, zero))))
    for reason, variant in variants:
        loss = loss_of(padded.b, variant, TokenMean(), None, penalty)
        if given is None:
            value = loss.value
        else:
            value = loss.numerator / float(as_tensor(given))
        keep = padded.rows(loss.keep)
        checks = [*record.loss_checks(value, padded.leaf), record.expect("divergence_mask", keep)]
        yield reason, [*checks, *record.checks(dppo_numbers(record, keep != 0))]


def _is_beyond_top_k(b: PolicyBatch) -> bool:
    """Return True if a sampled token in the loss is not among the top K of its position."""
    if b.top_k is None or b.token is None:
        return False
    differs = b.top_k != b.token[:, None]
    return bool(differs[b.loss_mask].all(1).any())


def _keep_of_trl(spec: Dppo, b: PolicyBatch, zero: Tensor) -> Tensor:
    """T19: an advantage of 0 counts as negative; the sampled token has no separate bucket besides the top K."""
    assert b.advantage is not None
    moved = replace(b, advantage=torch.where(zero, -1e-9, b.advantage))
    if b.top_k is not None and b.token is not None:
        moved = replace(moved, top_k=b.token[:, None].expand_as(b.top_k))  # as if it were one of them
    return spec(moved).keep


def vllm_correction(record: Record) -> Iterator[Attempt]:
    """GRPOTrainer's sampler correction: `mask` is 0 outside of inclusive bounds, `truncate` clamps both sides (T11)."""
    p = record.params
    level, _, mode = p.get("vllm_importance_sampling_mode", "sequence_mask").rpartition("_")
    low = p.get("clip_min")
    high = p.get("clip_max", 3.0)
    p.mark_irrelevant("use_vllm", "vllm_importance_sampling_correction")
    proximal = record.tensor("old_logp")
    sampling = record.tensor("sampling_logp")
    available = sampling.isfinite() & proximal.isfinite()  # T11: an unavailable log-prob has ratio 1
    proximal = torch.where(available, proximal, 0.0)
    sampling = torch.where(available, sampling, 0.0)
    padded = record.batch(log_prob=proximal, behavior_log_prob=sampling, proximal_log_prob=proximal)
    bound: Any = "clip" if mode == "mask" else "clamp"
    upper = float("inf") if high is None else high
    lower = 0.0 if low is None else low
    spec = Importance(level=level, bound=bound, upper=upper, lower=lower)
    theirs = as_tensor(record.expected["importance_sampling_ratio"])
    weight = padded.rows(spec(padded.b).weight)
    where = padded.mask  # theirs is 1, bounded, at padding
    if theirs.shape[1] == 1:  # one number per sequence: that of its first token
        weight = weight.gather(1, where.long().argmax(1, keepdim=True))
        where = where.any(1, keepdim=True)
    yield None, [record.expect("importance_sampling_ratio", weight, where=where)]


def ppo_loss(record: Record) -> Iterator[Attempt]:
    """TRL 1.3 PPOTrainer: clipped policy and value losses, each a token mean over its own mask."""
    p = record.params
    padded = rows_of(record)
    spec = PpoClip(p.get("cliprange", 0.2), p.get("cliprange", 0.2))
    policy = loss_of(padded.b, spec, TokenMean()).value
    value = record.tensor("vpreds").requires_grad_()
    inside = as_tensor(record.inputs["value_mask"]) != 0
    before = record.tensor("values")
    target = record.tensor("returns")
    bounded = ValueLoss(p.get("cliprange_value", 0.2))
    token, own = bounded(value.flatten(), before.flatten(), target.flatten(), inside.flatten())
    critic = token.sum() / inside.sum()
    total = policy + p.get("vf_coef", 0.1) * critic
    of_value, of_policy = torch.autograd.grad(total, [value, padded.leaf])
    numbers = {"loss": total.detach(), "pg_loss": policy.detach(), "vf_loss": critic.detach()}
    numbers |= {"grad_vpreds": of_value, "grad_logp": of_policy}
    checks = [record.expect(name, number) for name, number in numbers.items()]
    checks += record.checks({"vf_clipfrac": own["value_clip_fraction"].value}, under="")
    yield None, checks
