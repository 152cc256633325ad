"""AReaL: decoupled PPO with rejection, SAPO, M2PO's mask, proximal interpolation, GAE, normalisation, critic."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core.advantage.group import Grpo, Rloo, standardised
from proxima.core.advantage.protocol import TokenRewards
from proxima.core.advantage.token import Gae, place_scores, with_kl
from proxima.core.aggregate import TokenMean
from proxima.core.correction.importance import Importance
from proxima.core.correction.rejection import Rejection, SecondMoment
from proxima.core.loss import Corrected
from proxima.core.penalty import K1, K2, K3
from proxima.core.proximal import interpolated_proximal
from proxima.core.ratio import masked_log_ratio
from proxima.core.surrogate.clip import Gspo, PpoClip
from proxima.core.surrogate.weight import Sapo
from proxima.core.value import ValueLoss
from proxima.data.outcomes import Outcomes
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.by_hand import as_tensor
from proxima_peers.verify.record import Attempt, Check, Padded, Record, Tracked, UnsupportedRecord
from proxima_peers.verify.variants import Changed, beyond_limit, loss_of, reasons, unclamped

ESTIMATORS: dict[str, Any] = {"k1": K1(1.0), "k2": K2(1.0), "k3": K3(1.0)}


def swapped(spec: Rejection, b: PolicyBatch) -> Corrected:
    """A rejection with behavior and proximal policy swapped: AReaL's k1 and k3 use the reciprocal ratio (A3)."""
    return spec(replace(b, proximal_log_prob=b.behavior_log_prob, behavior_log_prob=b.proximal_log_prob))


def clamped_by_aggregate(reduce: Any, upper: float, lower: float, b: PolicyBatch) -> Corrected:
    """Geometric weights, clamped only in sequences whose aggregated ratio is out of bounds (A2)."""
    tested = Rejection("sequence", "ratio", reduce, upper, lower)(b)
    weight = Importance("geometric", "none")(b).weight
    weight = torch.where(tested.keep, weight, torch.where(b.loss_mask, weight.clamp(lower, upper), 0.0))
    return Corrected(weight, b.loss_mask, {})


def corrections_of(options: Tracked | None) -> Iterator[tuple[str | None, list[Any]]]:
    """Our corrections for RejectionSamplingConfig, then those with its peculiarities."""
    if options is None:
        yield None, []
        return
    level = options.get("level", "token")
    action = options.get("action", "mask")
    metric = options.get("metric", "ratio")
    reduce = options.get("agg", "mean")
    upper = options.get("upper", 5.0)
    lower = options.get("lower")
    if lower is None and metric == "ratio":
        lower = 0.0
    weights: Any = "token" if level == "token" else "geometric"
    if {"clamp": True, "mask": False}[action]:
        if metric != "ratio":
            raise UnsupportedRecord(f"AReaL clamps ratios only, not {metric}")
        yield None, [Importance(weights, "clamp", upper=upper, lower=lower)]
        if level == "sequence" and reduce != "mean":
            yield "A2", [Changed(clamped_by_aggregate, reduce, upper, lower or 0.0)]
        return
    kind: Any = {"kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3"}.get(metric, metric)
    floor = -math.inf if lower is None else lower
    rule = Rejection(level, kind, reduce, upper, floor)
    if kind != "ratio":
        weights = "token"  # geometric weights are used only with the ratio
    yield None, [rule, Importance(weights, "none")]
    if kind in ("k1", "k3"):
        yield "A3", [Changed(swapped, rule), Importance(weights, "none")]


def ppo(record: Record) -> Iterator[Attempt]:
    """functional.ppo_actor_loss_fn: PPO clip on π/π_prox times the behavior weight, over the original mask (A1)."""
    p = record.params
    padded = record.actor_batch(proximal_log_prob=record.tensor("prox_logp"))
    sequence = {"token": False, "sequence": True}[p.get("importance_sampling_level", "token")]
    low = p["eps_clip"]
    high = p.get("eps_clip_higher")
    dual = p.get("c_clip")
    if high is None:
        high = low
    low = min(low, 1.0)  # a ratio is positive
    spec: Any
    if sequence:
        spec = Gspo(low, high, "sequence", dual)
    else:
        spec = PpoClip(low, high, dual)
    options = p.get("rejection_sampling")
    loose = record.tolerance()
    if options is not None:  # the behavior weights are exponentials in float32 (A6)
        loose = (3e-7 * (1 + _farthest(padded.b)), 1e-9)
    p.mark_irrelevant("lens")
    record.inputs.mark_irrelevant("behavior_logp")
    for reason, corrections in corrections_of(options):
        numbers = ppo_numbers(record, padded, (low, high, dual), corrections, sequence=sequence)
        stats = record.checks(numbers, "stats.", *loose)
        for limit in _limits(padded.b):
            values = {False: loss_of(padded.b, spec, TokenMean(), corrections, bounded=not limit).value}
            if sequence and corrections:
                with unclamped() if limit else nullcontext():
                    values[True] = _on_kept_tokens(padded.b, spec, corrections)
            for kept, value in values.items():
                checks = record.loss_checks(value, padded.leaf, tolerance=loose)
                yield reasons(reason, A5=kept, A6=limit), [*checks, *stats]


def _limits(b: PolicyBatch) -> tuple[bool, ...]:
    """Whether to leave out our bound of the log-ratio, which AReaL lacks (A6): also yes where a token is beyond it."""
    if beyond_limit(masked_log_ratio(b)):
        return False, True
    return (False,)


def _farthest(b: PolicyBatch) -> float:
    """The largest |log π_prox − log μ|, in nats; in float32, its exponential is off by this times the rounding."""
    assert b.proximal_log_prob is not None and b.behavior_log_prob is not None
    gap = torch.where(b.loss_mask, b.proximal_log_prob - b.behavior_log_prob, 0.0)
    if not len(gap):
        return 0.0
    return float(gap.abs().nan_to_num(0.0, 0.0).amax())


def _on_kept_tokens(b: PolicyBatch, spec: Any, corrections: list[Any]) -> Tensor:
    """The loss with the sequence ratio over the tokens kept by rejection, weights per token, and the original
    denominator (A5)."""
    keep = b.loss_mask
    weight = torch.ones_like(b.log_prob)
    for correction in corrections:
        corrected = correction(b)
        keep = keep & corrected.keep
        weight = weight * corrected.weight
    token = spec(replace(b, loss_mask=keep))
    aggregate = TokenMean()
    return aggregate(torch.where(keep, token.loss * weight, 0.0), b) / aggregate.denominator(b.loss_mask, b.cu_seqlens)


def sapo(record: Record) -> Iterator[Attempt]:
    """functional.sapo_loss_fn"""
    p = record.params
    if p.get("rejection_sampling") is not None:
        raise UnsupportedRecord("sapo_loss_fn takes no rejection_sampling")
    padded = record.actor_batch(proximal_log_prob=record.tensor("behavior_logp"))
    spec = Sapo(p["tau_pos"], p["tau_neg"], p.get("importance_sampling_level", "token"))
    p.mark_irrelevant("lens")
    stats = record.checks(sapo_numbers(record, padded, spec), "stats.", *record.tolerance())
    for limit in _limits(padded.b):
        loss = loss_of(padded.b, spec, TokenMean(), bounded=not limit).value
        yield reasons(A6=limit), [*record.loss_checks(loss, padded.leaf), *stats]


def second_moment(record: Record) -> Iterator[Attempt]:
    """actor._apply_m2po_masking"""
    before = record.tensor("prox_logp")
    padded = record.batch(log_prob=before, behavior_log_prob=record.tensor("behavior_logp"), proximal_log_prob=before)
    ours = SecondMoment(record.params["m2_threshold"])(padded.b)
    yield None, [record.expect("mask", padded.rows(ours.weight * ours.keep))]


def proximal_interpolation(record: Record) -> Iterator[Attempt]:
    """actor.compute_prox_logp_approximations; a in float32."""
    record.inputs.mark_irrelevant("mask", "versions")
    p = record.params
    p.mark_irrelevant("current_version")
    behavior = record.tensor("behavior_logp")
    current = record.tensor("logp")
    ours: Any = behavior
    if p["method"] != "rollout":
        versions = torch.tensor(record.inputs["versions"])
        ours = interpolated_proximal(behavior, current, versions, p["current_version"], p["method"])
    if p["method"] == "linear":
        ours = (ours, (ours.exp() + 1e-10).log())  # AReaL adds this to the probability
    yield None, [record.expect("prox_logp", ours, 2e-7, scale=float((current - behavior).abs().max()))]


def kl_estimate(record: Record) -> Iterator[Attempt]:
    """data.KLEstimator"""
    record.inputs.mark_irrelevant("mask")
    p = record.params
    limit = 10.0 if p.get("apply_clamp", True) else math.inf
    gap = record.tensor("logp") - record.tensor("reference_logp")
    estimate = ESTIMATORS[p.get("kl_estimator", "k1")].estimate(gap)
    yield None, [record.expect("kl", estimate.clamp(-limit, limit), 2e-6, 2e-6)]


def areal_advantages(record: Record) -> Iterator[Attempt]:
    """PPOActor._compute_advantages: values are at the position that predicts a token, one to its left (A7)."""
    p = record.params
    attention = as_tensor(record.inputs["attention_mask"]) != 0
    rows, width = attention.shape
    mask = (as_tensor(record.inputs["loss_mask"]) != 0).roll(-1, 1)
    mask[:, -1] = False
    limit = p.get("reward_clip", 20.0)
    score = (as_tensor(record.inputs["rewards"]) + p.get("reward_bias", 0.0)) * p.get("reward_scaling", 1.0)
    score = score.clamp(-limit, limit)
    for name in ("reward_norm", "overlong_reward_penalty"):
        if p.get(name):
            raise UnsupportedRecord(f"no reading of {name}={p[name]!r}")
    behavior = torch.where(mask, as_tensor(record.inputs["logprobs"]).roll(-1, 1), 0.0)
    reference = torch.where(mask, as_tensor(record.inputs["ref_logp"]), 0.0)
    estimate = ESTIMATORS[p.get("kl_estimator", "k1")].estimate(behavior - reference).clamp(-10, 10)
    length = attention.sum(1)
    before_last = torch.arange(width) <= (length - 2).clamp(min=0)[:, None]
    edges = torch.arange(rows + 1) * width
    endless = length == width  # no end token
    if p.get("mask_no_eos_with_zero", False):
        score = torch.where(endless, 0.0, score)
    reward = place_scores(score, before_last.flatten(), edges)
    reward = with_kl(reward, estimate.flatten(), mask.flatten(), p.get("kl_ctl", 0.1))
    value = as_tensor(record.inputs["values"])
    last = torch.where(endless, value[:, -1], 0.0)  # bootstrapped without an end token
    flat = {"reward": reward, "value": value.flatten(), "loss_mask": mask.flatten()}
    rewards = TokenRewards(**flat, cu_seqlens=edges, bootstrap=last)
    gae = Gae(p.get("discount", 1.0), p.get("gae_lambda", 1.0), whiten=False)
    ours = gae(rewards)
    if {None: False, "batch mean/std": True}[p.get("adv_norm")]:
        ours = standardised(ours, mask.flatten(), 1e-5)
    both = {
        "tot_rewards": reward.view(rows, width),
        "kl_rewards": -p.get("kl_ctl", 0.1) * estimate * mask,
        "loss_mask": mask.double(),
        "logprobs": behavior,
    }
    inside = {"advantages": ours.view(rows, width), "returns": gae.returns(rewards).view(rows, width)}
    loose = (2e-5, 2e-6)  # float32; beyond the mask the recursion carries the next token's along
    yield None, [*record.checks(both, "", *loose), *record.checks(inside, "", *loose, where=mask)]


def masked_normalization(record: Record) -> Iterator[Attempt]:
    """functional.masked_normalization, where padding counts as 0; ours has the unbiased standard deviation (A7)."""
    p = record.params
    mask = record.mask
    values = record.tensor("values")
    epsilon = p.get("eps", 1e-5)
    biased = not p.get("unbiased", False)
    p.mark_irrelevant("all_reduce")  # there is only one process
    loose = (2e-6, 1e-6)  # the results are float32
    if p.get("high_precision", True):
        loose = (3e-7, 1e-9)

    def checks(share: float) -> list[Check]:
        """With a deviation that is this share of the unbiased one."""
        ours = standardised(values.flatten(), mask.flatten(), epsilon / share) / share
        return [record.expect("out", ours.view(mask.shape), *loose, where=mask)]

    yield None, checks(1.0)
    if biased:
        yield "A7", checks(math.sqrt(1 - 1 / int(mask.sum())))


def normalization(record: Record) -> Iterator[Attempt]:
    """data.Normalization of rewards."""
    p = record.params
    x = as_tensor(record.inputs["x"])
    mean = p.get("mean_level", "batch")
    std = p.get("std_level", "batch")
    alone = p.get("mean_leave1out", False)
    size = p.get("group_size", 1) or 1
    epsilon = p.get("eps", 1e-5)
    biased = not p.get("std_unbiased", True)
    if mean not in ("batch", "group") or (mean, std) == ("batch", "group"):
        raise UnsupportedRecord(f"nothing of ours centres by {mean} and scales by {std}")
    if mean == "batch":
        size = len(x)
    group = torch.arange(len(x)) // size
    o = Outcomes.of(x, group)
    scale: Any = {"group": "group", "batch": "batch", None: "none", "none": "none"}[std]
    loose = (3e-7, 1e-9)  # the results are float32
    centre: Any = Rloo() if alone else Grpo()
    if scale == "none":
        yield None, [record.expect("out", centre(o), *loose)]
        return
    if not alone:
        yield None, [record.expect("out", Grpo(scale, epsilon)(o), *loose)]
    # AReaL takes the deviation after centring; the biased one is a share of ours
    share = torch.ones(())
    if biased:
        count = torch.tensor(len(x))
        if scale == "group":
            count = (group[:, None] == group[None]).sum(1)
        share = (1 - 1 / count.double()).sqrt()
    if alone or biased or (mean, std) == ("group", "batch"):
        left = replace(o, reward=centre(o) * share)
        yield "A7", [record.expect("out", Grpo(scale, epsilon)(left) / share, *loose)]


def critic_loss(record: Record) -> Iterator[Attempt]:
    """functional.ppo_critic_loss_fn"""
    p = record.params
    mask = record.mask
    leaf = record.tensor("vpreds").requires_grad_()
    error: Any = {"mse": "squared", "huber": "huber"}[p.get("loss_fn_type", "mse")]
    spec = ValueLoss(p["value_eps_clip"], error)
    flat = [x.flatten() for x in (leaf, record.tensor("values"), record.tensor("returns"), mask)]
    token, _ = spec(*flat)
    loss = token.sum() / mask.sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    unbounded, _ = replace(spec, epsilon=float("inf"))(*flat)
    numbers = {"loss": loss.detach(), "grad_vpreds": gradient, "clip_mask": (token > unbounded).view(mask.shape)}
    yield None, record.checks(numbers, "", 2e-5, 2e-6)


# --- the per-token tensors that its losses report, padding included (A2, A4, A6)


def ppo_numbers(
    record: Record, padded: Padded, clip: tuple[float, float, float | None], corrections: list[Any], *, sequence: bool
) -> dict[str, Any]:
    """The metrics that `ppo_actor_loss_fn` reports.

    Args:
        clip: the clip range below and above 1, and the dual clip.
        corrections: ours for its rejection sampling: a rejection and plain weights (mask), or only weights (clamp).
        sequence: one ratio per sequence.
    """
    kept = padded.mask
    weight = None
    behave = {}
    if corrections:
        *rejecting, weighing = corrections
        for rejection in rejecting:
            kept = kept & (padded.rows(rejection(padded.b).keep) != 0)
        weight = torch.where(kept, padded.rows(weighing(padded.b).weight), 0.0)
        if rejecting:
            filtered = padded.mask & ~kept
        else:
            filtered = padded.mask & (weight != _unbounded(padded, corrections[0]))
        behave = _behave_numbers(record, kept, weight)
        behave["filtered_fraction"] = filtered.sum() / padded.mask.sum().clamp(min=1)
    gap = record.tensor("logp") - record.tensor("prox_logp")
    ratio, advantage = _reported_ratio(record, kept, gap, sequence=sequence)
    low, high, dual = clip
    plain = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, bounded)
    far = torch.zeros_like(kept)
    if dual is not None:  # for both signs (A4)
        far = kept & (dual * advantage.abs() < loss)
        loss = torch.minimum(loss, dual * advantage.abs())
    if weight is not None:
        loss = loss * weight
    numbers = {
        "loss": loss,
        "importance_weight": ratio,
        "approx_kl": gap,
        "clip_mask": kept & (plain < bounded),
        "dual_clip_mask": far,
    }
    return {name: _packed(record, values) for name, values in (numbers | behave).items()}


def sapo_numbers(record: Record, padded: Padded, spec: Sapo) -> dict[str, Any]:
    """The metrics that `sapo_loss_fn` reports; token ratios are not masked (A6)."""
    gap = record.tensor("logp") - record.tensor("behavior_logp")
    sequence = spec.level == "sequence"
    kept = padded.mask if sequence else torch.ones_like(padded.mask)
    ratio, advantage = _reported_ratio(record, kept, gap, sequence=sequence)
    positive = 4 / spec.tau_positive * torch.sigmoid(spec.tau_positive * (ratio - 1))
    negative = 4 / spec.tau_negative * torch.sigmoid(spec.tau_negative * (ratio - 1))
    gate = torch.where(advantage > 0, positive, negative)
    none = torch.zeros_like(padded.mask)
    numbers = {
        "loss": -gate * advantage,
        "importance_weight": ratio,
        "approx_kl": gap,
        "clip_mask": none,
        "dual_clip_mask": none,
        "sapo_soft_gate": gate,
        "sapo_scaled_gate_pos": positive,
        "sapo_scaled_gate_neg": negative,
    }
    return {name: _packed(record, values) for name, values in numbers.items()}


def _reported_ratio(record: Record, kept: Tensor, gap: Tensor, *, sequence: bool) -> tuple[Tensor, Tensor]:
    """The ratio, 0 where not kept, and the advantages, each of tokens or of whole sequences (A5)."""
    advantage = record.tensor("advantages")
    if not sequence:
        return torch.where(kept, gap.exp(), 0.0), advantage
    count = kept.sum(1, keepdim=True).clamp(min=1)
    mean = torch.where(kept, gap, 0.0).sum(1, keepdim=True) / count
    own = torch.where(kept, advantage, 0.0).sum(1, keepdim=True) / count
    return torch.where(kept, mean.exp(), 0.0), torch.where(kept, own, 0.0)


def _behave_numbers(record: Record, kept: Tensor, weight: Tensor) -> dict[str, Any]:
    inside = kept & (weight > 0)
    gap = record.tensor("prox_logp") - record.tensor("behavior_logp")
    return {"behave_imp_weight": weight, "behave_mask": inside, "behave_approx_kl": torch.where(inside, gap, 0.0)}


def _unbounded(padded: Padded, spec: Any) -> Tensor:
    """The weights before the clamp."""
    level = spec.level if isinstance(spec, Importance) else "geometric"
    return padded.rows(Importance(level, "none")(padded.b).weight)


def _packed(record: Record, values: Tensor) -> Tensor:
    """[B, T] → [N] if the record's rows were packed: the first `lens` positions of each."""
    lengths = record.params.get("lens")
    if lengths is None or values.dim() == 0:
        return values
    return torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])
