"""verl's policy losses, aggregation, value loss and KL."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core import AGGREGATE_ALIASES, AGGREGATES, PENALTIES
from proxima.core.advantage.token import whiten
from proxima.core.aggregate import SequenceMeanTokenMean, SequenceMeanTokenSumNorm
from proxima.core.loss import Loss, apply_corrections
from proxima.core.metrics import Metrics, SumCount
from proxima.core.ratio import masked_log_ratio
from proxima.core.reward_kl import AdaptiveCoefficient, RewardKl
from proxima.core.segment import segment_mean
from proxima.core.surrogate.clip import Gspo, PpoClip, Reinforce
from proxima.core.surrogate.cppo import Dppo
from proxima.core.surrogate.weight import Cispo, GeoMean, Sapo
from proxima.core.surrogate.whole_batch import ClipCov, Dro, KlCov
from proxima.core.value import ValueLoss
from proxima.data.policy_batch import PolicyBatch
from proxima_peers.verify.record import Attempt, Check, Padded, Record, Tracked, UnsupportedRecord
from proxima_peers.verify.variants import (
    Changed,
    beyond_limit,
    beyond_ten,
    clamped_at_ten,
    given_weights,
    loss_of,
    reasons,
)
from proxima_peers.verify.verl_metrics import actor_numbers, number_checks
from proxima_peers.verify.verl_rollout import correction_numbers, importance, readings, rejections_of

# Options that verl's actor accepts; they don't affect a loss that does not read them.
ACTOR_OPTIONS = (
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "tau_pos",
    "tau_neg",
    "policy_loss.loss_mode",
    "policy_loss.clip_cov_ratio",
    "policy_loss.clip_cov_lb",
    "policy_loss.clip_cov_ub",
    "policy_loss.kl_cov_ratio",
    "policy_loss.ppo_kl_coef",
    "policy_loss.dro_beta",
    "policy_loss.rollout_correction",
)
STEP_COUNTS = ("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor")


def counts_of_step(record: Record) -> dict[str, Any]:
    """The denominators of the whole step that a record may have, in `global_batch_info` or next to it."""
    inside = record.params.section("global_batch_info")
    counts = {}
    for name in STEP_COUNTS:
        beside = record.params.get(name)
        counts[name] = _or(inside.get(name), beside)
    return counts


def aggregate_of(record: Record, width: int) -> Any:
    """The aggregation of a record; verl's norm divides by the padded width unless a factor is given (P1)."""
    kind = AGGREGATES[AGGREGATE_ALIASES[record.params["loss_agg_mode"]]]
    horizon = counts_of_step(record)["loss_scale_factor"]
    if kind is SequenceMeanTokenSumNorm:
        return kind(horizon=_or(horizon, width))
    return kind()


def token_loss(record: Record, values: Tensor, b: PolicyBatch) -> Loss:
    """The loss from values [N] with the record's aggregation."""
    spec = aggregate_of(record, record.mask.shape[1])
    return Loss(spec(values, b), spec.denominator(b.loss_mask, b.cu_seqlens), {})


def step_value(record: Record, loss: Loss) -> Tensor:
    """The loss with the denominators of the whole step, if the record has them."""
    counts = counts_of_step(record)
    mode = record.params["loss_agg_mode"]
    if mode == "token-sum":
        given = None
    elif mode == "token-mean":
        given = counts["batch_num_tokens"]
    else:
        given = counts["global_batch_size"]
    value = loss.value if given is None else loss.numerator / given
    return value * (counts["dp_size"] or 1)


def clip_range(p: Tracked) -> tuple[float, float, float]:
    """The clip range below and above, and the dual clip; by default .2, .2 and 3, whatever `clip_ratio` is (P4)."""
    both = p.get("clip_ratio", 0.2)
    low = _or(p.get("clip_ratio_low", 0.2), both)
    high = _or(p.get("clip_ratio_high", 0.2), both)
    return low, high, p.get("clip_ratio_c", 3.0)


def verl_surrogate(record: Record) -> Any:
    """Our spec for verl's `loss_mode` and its options; None if there is none."""
    p = record.params
    own = p.section("policy_loss")
    low, high, cap = clip_range(p)
    floor = min(low, 1.0)  # a ratio is positive: 1 is no bound at all

    def clip_cov() -> ClipCov:
        share = _or(own.get("clip_cov_ratio"), 2e-4)
        lowest = _or(own.get("clip_cov_lb"), 1.0)
        highest = _or(own.get("clip_cov_ub"), 5.0)
        return ClipCov(floor, high, share, lowest, highest)

    makers: dict[str, Any] = {
        "vanilla": lambda: PpoClip(floor, high, cap),
        "dppo_tv": lambda: Dppo("binary_tv", high, low, cap),
        "dppo_kl": lambda: Dppo("binary_kl", high, low, cap),
        "gspo": lambda: Gspo(floor, high),
        "sapo": lambda: Sapo(p.get("tau_pos", 1.0), p.get("tau_neg", 1.05)),
        "gpg": Reinforce,
        "reinforce": Reinforce,
        "clip_cov": clip_cov,
        "kl_cov": lambda: KlCov(_or(own.get("kl_cov_ratio"), 2e-4), own.get("ppo_kl_coef", 0.1)),
        "geo_mean": lambda: GeoMean(low, high, "log_ratio"),
        "dro": lambda: Dro(own["dro_beta"]),
        "cispo": lambda: Cispo(floor, high),
    }
    maker = makers.get(p["loss_mode"])
    if maker is None:
        return None
    return maker()


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def policy(record: Record) -> Iterator[Attempt]:
    """core_algos.compute_policy_loss_*"""
    mode = record.params["loss_mode"]
    if mode == "bypass_mode":
        yield from bypass(record)
        return
    padded = policy_rows(record)
    spec = verl_surrogate(record)
    aggregate = aggregate_of(record, padded.mask.shape[1])
    counts_of_step(record)
    record.params.mark_irrelevant(*ACTOR_OPTIONS)
    if spec is None:
        raise UnsupportedRecord(f"no reading of loss_mode {mode!r}")
    if isinstance(spec, ClipCov):
        _refuse_random_choice(spec, padded.b)
    weight = padded.b.weight
    padded = replace(padded, b=replace(padded.b, weight=None))
    correction = None if weight is None else Changed(given_weights, weight)
    metrics = number_checks(record, actor_numbers(spec, padded.b))
    loss = loss_of(padded.b, spec, aggregate, correction)
    yield None, [*record.loss_checks(step_value(record, loss), padded.leaf), *metrics]
    if not bool(padded.b.loss_mask.any()):
        yield _of_no_token(record, actor_numbers(spec, padded.b))
    if mode in ("sapo", "geo_mean"):  # always a mean over sequences
        record = replace(record, params=Tracked({**record.params, "loss_agg_mode": "seq-mean-token-mean"}))
    if mode == "sapo" and not isinstance(aggregate, SequenceMeanTokenMean):
        value = step_value(record, loss_of(padded.b, spec, SequenceMeanTokenMean(), correction))
    elif mode == "geo_mean":
        own = spec if weight is None else Changed(_geo_mean_weighted, spec, weight)
        value = loss_of(padded.b, own, SequenceMeanTokenMean(), bounded=False).numerator / len(padded.mask)
    elif mode == "gspo" and beyond_ten(padded.b):
        own = Changed(clamped_at_ten, spec)
        value = step_value(record, loss_of(padded.b, own, aggregate, correction, bounded=False))
    elif mode in ("clip_cov", "kl_cov") and beyond_limit(masked_log_ratio(padded.b)):
        value = step_value(record, loss_of(padded.b, spec, aggregate, correction, bounded=False))
    else:
        return
    reason = {"sapo": "P6", "geo_mean": "P10", "gspo": "P5", "clip_cov": "P8", "kl_cov": "P9"}[mode]
    yield reason, [*record.loss_checks(value, padded.leaf), *metrics]


def _refuse_random_choice(spec: ClipCov, b: PolicyBatch) -> None:
    """Refuse a record in which verl picks at random, because more tokens are eligible than it may drop (P8)."""
    eligible = int(replace(spec, share=1.0).select_tokens(b).sum())
    most = max(int(spec.share * int(b.loss_mask.sum())), 1)
    if eligible > most:
        raise UnsupportedRecord(f"P8: verl picks {most} of {eligible} tokens at random; the record does not say which")


def _of_no_token(record: Record, numbers: Metrics) -> Attempt:
    """verl's loss without any token is NaN, and its metrics are 0 (P1)."""
    zeros = {name: SumCount(torch.zeros(()), torch.ones(())) for name in numbers}
    nowhere = torch.zeros_like(record.mask)
    gradient = record.expect("grad_logp", nowhere, where=nowhere)
    return "P1", [record.expect("loss", math.nan), gradient, *number_checks(record, zeros)]


def policy_rows(record: Record) -> Padded:
    for key in ("is_weights", "rollout_is_weights"):
        if record.has(key):
            return record.actor_batch(weight=record.tensor(key))
    return record.actor_batch()


def _geo_mean_weighted(spec: GeoMean, weight: Tensor, b: PolicyBatch) -> Any:
    """verl's geo_mean, in which given weights enter as the geometric mean of w + 1e-10 (P10)."""
    out = spec(b)
    mean = segment_mean((weight + 1e-10).log(), b.loss_mask, b.cu_seqlens).exp()
    return replace(out, loss=out.loss * mean[b.sequence_index])


def bypass(record: Record) -> Iterator[Attempt]:
    """Bypass mode: the behavior policy is the proximal one, rejection compares with the current policy, and only
    REINFORCE applies weights (P13)."""
    record.params.section("policy_loss").section("rollout_correction").mark_irrelevant("bypass_mode")
    own = record.params.section("policy_loss")["rollout_correction"]
    padded = policy_rows(record)
    aggregate = aggregate_of(record, padded.mask.shape[1])
    reinforce = {"reinforce": True, "ppo_clip": False}[own.get("loss_type", "ppo_clip")]
    low, high, dual = clip_range(record.params)
    record.params.mark_irrelevant(*ACTOR_OPTIONS)
    spec: Any
    if reinforce:
        spec = Reinforce()
    else:
        spec = PpoClip(min(low, 1.0), high, dual)
    for reason, inverted, more in readings(own, padded, proximal=False):
        chosen: list[Any] = rejections_of(own, "current", inverted=inverted)
        kept = replace(padded.b, loss_mask=apply_corrections(padded.b, chosen)[0].loss_mask)
        if reinforce and own.get("rollout_is"):
            chosen.append(importance(own, "current"))
        checks = record.loss_checks(step_value(record, loss_of(padded.b, spec, aggregate, chosen)), padded.leaf)
        actor = actor_numbers(spec, kept)
        others = correction_numbers(own, padded, more, "current", inverted=inverted)
        yield reason, [*checks, *number_checks(record, actor | others)]
        if not bool(kept.loss_mask.any()):
            empty, nothing = _of_no_token(record, actor)
            yield ", ".join(filter(None, (empty, reason))), [*nothing, *number_checks(record, others)]


def aggregation(record: Record) -> Iterator[Attempt]:
    """core_algos.agg_loss"""
    counts_of_step(record)
    matrix = record.tensor("loss_mat").requires_grad_()
    b = PolicyBatch.from_padded(record.mask, log_prob=matrix)
    loss = token_loss(record, b.log_prob, b)
    yield None, record.loss_checks(step_value(record, loss), matrix, "grad_loss_mat")


def value_loss(record: Record) -> Iterator[Attempt]:
    """core_algos.compute_value_loss"""
    counts_of_step(record)
    leaf = record.tensor("vpreds").requires_grad_()
    fields = {"advantage": record.tensor("values"), "behavior_log_prob": record.tensor("returns")}
    b = PolicyBatch.from_padded(record.mask, log_prob=leaf, **fields)
    assert b.advantage is not None and b.behavior_log_prob is not None
    spec = ValueLoss(epsilon=record.params["cliprange_value"])
    token, metrics = spec(b.log_prob, b.advantage, b.behavior_log_prob, b.loss_mask)
    value = step_value(record, token_loss(record, token, b))
    checks = record.loss_checks(value, leaf, "grad_vpreds")
    yield None, [*checks, *record.checks({"vf_clipfrac": metrics["value_clip_fraction"].value})]


KL_NAMES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_spec(name: str) -> Any:
    """Our spec for a KL estimator by verl's name, with verl's clamp of k3 at 10."""
    kind = KL_NAMES[name.removesuffix("+")]
    straight = name.endswith("+")
    if kind == "k3":
        return PENALTIES[kind](coefficient=1.0, straight_through=straight, limit=10.0)
    return PENALTIES[kind](coefficient=1.0, straight_through=straight)


def kl_penalty(record: Record) -> Iterator[Attempt]:
    """core_algos.kl_penalty, over all positions, masked or not."""
    leaf = record.tensor("logp").requires_grad_()
    kl = kl_spec(record.params["kl_penalty"]).divergence(leaf, record.tensor("reference_logp"))
    (gradient,) = torch.autograd.grad(kl.sum(), leaf, retain_graph=True)
    loose = record.tolerance()
    checks = [record.expect("kl", kl.detach(), *loose), record.expect("grad_sum_kl", gradient, *loose)]
    b = PolicyBatch.from_padded(record.mask, log_prob=kl)
    for mode, numbers in record.expected.get("agg", {}).items():
        aggregated = replace(record, params=Tracked({"loss_agg_mode": mode}))
        value = token_loss(aggregated, b.log_prob, b).value
        loose = aggregated.tolerance()
        checks.append(record.expect(f"agg.{mode}.loss", value.detach(), *loose))
        if "grad_logp" in numbers:
            (slope,) = torch.autograd.grad(value, leaf, retain_graph=True)
            checks.append(record.expect(f"agg.{mode}.grad_logp", slope, *loose))
    yield None, checks


def adaptive_kl(record: Record) -> Iterator[Attempt]:
    """core_algos.AdaptiveKLController"""
    p = record.params
    controller = AdaptiveCoefficient(p["target_kl"], p["horizon"])
    sizes = record.inputs["n_steps"]
    attempts = [False]
    if max(sizes, default=0) > controller.horizon:
        attempts.append(True)
    for unbounded in attempts:
        beta = p["init_kl_coef"]
        values = []
        for kl, samples in zip(record.inputs["current_kl"], sizes, strict=True):
            beta = _next_coefficient(controller, beta, kl, samples, unbounded=unbounded)
            values.append(beta)
        yield reasons(P23=unbounded), [Check("values", values, record.expected["values"])]


def _next_coefficient(
    controller: AdaptiveCoefficient, beta: float, kl: float, samples: int, *, unbounded: bool
) -> float:
    """Our update; `unbounded`: a step of n horizons moves it n times as far as a step of one horizon (P23)."""
    times = 1.0
    if unbounded:
        times = max(times, samples / controller.horizon)
    return beta + times * (controller.next(beta, kl, samples) - beta)


def kl_in_reward(record: Record) -> Iterator[Attempt]:
    """ray_trainer.apply_kl_penalty"""
    p = record.params
    mask = record.mask
    estimator: Any = {"kl": "k1", "low_var_kl": "k3"}.get(p["kl_penalty"], p["kl_penalty"])
    adaptive = AdaptiveCoefficient(p["target_kl"], p["horizon"])
    limit = 10.0 if estimator == "k3" else math.inf  # P22
    spec = RewardKl(p["init_kl_coef"], estimator, adaptive, limit)
    policy, reference = (record.tensor(name)[mask] for name in ("old_log_probs", "reference_logp"))
    cu_seqlens = torch.cat([mask.new_zeros(1, dtype=torch.long), mask.sum(1).cumsum(0)])
    shaped = spec(record.tensor("token_level_scores").sum(1), policy, reference, mask[mask], cu_seqlens)
    rewards = torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, shaped.reward.double())
    empty = not bool(shaped.some.all())
    beta = p["init_kl_coef"]
    means = (False, True) if empty else (False,)
    updates = (False, True) if len(mask) > adaptive.horizon else (False,)
    for of_all in means:
        mean = float(shaped.kl.mean()) if of_all else shaped.mean_kl
        for unbounded in updates:
            after = _next_coefficient(adaptive, beta, mean, len(mask), unbounded=unbounded)
            # verl divides a row by n + 1e-8, and the coefficient multiplies the error
            scale = beta * max(1.0, len(mask) / adaptive.horizon) * float(shaped.kl.abs().max()) / adaptive.target
            checks = [record.expect("token_level_rewards", rewards)]
            checks.append(record.expect("kl_coef_after", after, 1e-8, scale=scale))
            # the coefficient before the update (P23)
            metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": beta}
            yield reasons(P23=unbounded, P27=of_all), [*checks, *record.checks(metrics)]


def whitening(record: Record) -> Iterator[Attempt]:
    """torch_functional.masked_mean, masked_var, masked_whiten; at padding verl leaves garbage (P18)."""
    mask = record.mask
    values = record.tensor("values")
    chosen = values[mask]
    checks = [record.expect("mean", chosen.mean(), 1e-8, scale=float(chosen.abs().mean()))]
    checks += record.checks({"var": chosen.var(), "var_biased": chosen.var(correction=0)}, under="")
    for name, shift in (("whiten", True), ("whiten_noshift", False)):
        ours = whiten(values.flatten(), mask.flatten(), shift=shift).view(mask.shape)
        checks.append(record.expect(name, ours, 1e-7, 1e-8, where=mask))
    yield None, checks
