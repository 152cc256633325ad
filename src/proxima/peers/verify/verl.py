"""verl's policy losses, aggregation, value loss and KL."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.advantage import whiten
from proxima.core.aggregate import AGGREGATE_ALIASES, AGGREGATES, SequenceMeanTokenMean, SequenceMeanTokenSumNorm
from proxima.core.loss import Corrected, Loss, apply_corrections, policy_loss
from proxima.core.penalty import PENALTIES, AdaptiveCoefficient
from proxima.core.ratio import masked_log_ratio
from proxima.core.segment import segment_mean
from proxima.core.surrogate import Cispo, ClipCov, Dppo, Dro, GeoMean, Gspo, KlCov, PpoClip, Reinforce, Sapo
from proxima.core.surrogate.clip import clipped
from proxima.core.value import ValueLoss
from proxima.data import PolicyBatch
from proxima.peers.verify.record import Attempt, Check, Padded, Record
from proxima.peers.verify.verl_actor import actor_numbers
from proxima.peers.verify.verl_mismatch import number_checks
from proxima.peers.verify.verl_options import (
    correction_numbers,
    documented_rejections,
    filled,
    importance,
    shipped_rejections,
)


@dataclass(frozen=True)
class Given:
    """A correction whose weights [N] somebody else computed."""

    weight: Tensor
    rejected: Literal["count"] = "count"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, b: PolicyBatch) -> Corrected:
        return Corrected(self.weight, b.loss_mask & (self.weight > 0), {})


def aggregate_of(record: Record, width: int) -> Any:
    """The aggregation a record asks for; verl's norm divides by the padded width unless told otherwise (P1)."""
    kind = AGGREGATES[AGGREGATE_ALIASES[record.params["loss_agg_mode"]]]
    if kind is SequenceMeanTokenSumNorm:
        return kind(horizon=record.params.get("loss_scale_factor") or width)
    return kind()


def token_loss(record: Record, values: Tensor, b: PolicyBatch) -> Loss:
    """Values [N] under the aggregation of the record."""
    spec = aggregate_of(record, record.mask.shape[1])
    return Loss(spec(values, b), spec.denominator(b.loss_mask, b.cu_seqlens), {})


def step_value(record: Record, loss: Loss) -> Tensor:
    """The loss under the denominators of the whole step that the record may give (`global_batch_info`)."""
    info = {**record.params, **(record.params.get("global_batch_info") or {})}
    mode, world = info["loss_agg_mode"], info.get("dp_size") or 1
    name = "batch_num_tokens" if mode == "token-mean" else "global_batch_size" if mode.startswith("seq") else ""
    given = info.get(name)
    return (loss.value if given is None else loss.numerator / given) * world


def clip_range(p: dict[str, Any]) -> tuple[float, float, float | None]:
    """The clip range below and above, and the dual clip."""
    low, high = (p["clip_ratio"] if p.get(key) is None else p[key] for key in ("clip_ratio_low", "clip_ratio_high"))
    return low, high, p.get("clip_ratio_c")


def verl_surrogate(record: Record) -> Any:
    """Our spec for verl's `loss_mode` and its options; None when there is none."""
    p = record.params
    own = p.get("policy_loss") or {}
    low, high, cap = clip_range(p)
    makers: dict[str, Any] = {
        "vanilla": lambda: PpoClip(low, high, cap),
        "dppo_tv": lambda: Dppo("binary_tv", high, low, cap),
        "dppo_kl": lambda: Dppo("binary_kl", high, low, cap),
        "gspo": lambda: Gspo(low, high),
        "sapo": lambda: Sapo(p["tau_pos"], p["tau_neg"]),
        "gpg": Reinforce,
        "reinforce": Reinforce,
        "clip_cov": lambda: ClipCov(low, high, own["clip_cov_ratio"], own["clip_cov_lb"], own["clip_cov_ub"]),
        "kl_cov": lambda: KlCov(own["kl_cov_ratio"], own["ppo_kl_coef"]),
        "geo_mean": lambda: GeoMean(low, high, "log_ratio"),
        "dro": lambda: Dro(own["dro_beta"]),
        "cispo": lambda: Cispo(low, high),
    }
    maker = makers.get(p["loss_mode"])
    return None if maker is None else maker()


def policy(record: Record) -> Iterator[Attempt]:
    """core_algos.compute_policy_loss_*"""
    if record.params["loss_mode"] == "bypass_mode":
        yield from bypass(record)
        return
    padded = policy_rows(record)
    spec, aggregate = verl_surrogate(record), aggregate_of(record, padded.mask.shape[1])
    correction = None if padded.b.weight is None else Given(padded.b.weight)
    metrics = number_checks(record, actor_numbers(spec, padded.b))
    loss = run(padded.b, spec, aggregate, correction)
    yield None, [*record.loss_checks(step_value(record, loss), padded.leaf), *metrics]
    by_row = replace(record, params={**record.params, "loss_agg_mode": "seq-mean-token-mean"})
    if record.params["loss_mode"] == "sapo":
        loss = run(padded.b, spec, SequenceMeanTokenMean(), correction)
        yield "P6", [*by_row.loss_checks(step_value(by_row, loss), padded.leaf), *metrics]
    if record.params["loss_mode"] == "gspo":
        loss = run(padded.b, _GspoClampedAtTen(spec), aggregate, correction)
        yield "P5", [*record.loss_checks(step_value(record, loss), padded.leaf), *metrics]
    if record.params["loss_mode"] == "geo_mean":
        loss = run(padded.b, _GeoMeanWeighted(spec), SequenceMeanTokenMean(), None)
        yield "P10", [*by_row.loss_checks(loss.numerator / len(padded.mask), padded.leaf), *metrics]


def run(b: PolicyBatch, spec: Any, aggregate: Any, correction: Any) -> Loss:
    return policy_loss(b, surrogate=spec, aggregate=aggregate, correction=correction, check=False)


def policy_rows(record: Record) -> Padded:
    given = next((key for key in ("is_weights", "rollout_is_weights") if record.has(key)), None)
    return record.actor_batch(**({} if given is None else {"weight": record.tensor(given)}))


@dataclass(frozen=True)
class _GspoClampedAtTen:
    """verl's gspo: the sequence's log-ratio is clamped at 10 from above, without a gradient beyond (P5)."""

    spec: Gspo
    needs: ClassVar[frozenset[str]] = Gspo.needs

    def __call__(self, b: PolicyBatch) -> Any:
        own = masked_log_ratio(b)
        mean = segment_mean(own, b.loss_mask, b.cu_seqlens).detach()[b.sequence_index]
        ratio = (mean + own - own.detach()).clamp(max=10.0).exp()
        out = clipped(ratio, b.masked("advantage"), b.loss_mask, self.spec.epsilon_low, self.spec.epsilon_high)
        return replace(self.spec(b), loss=torch.where(b.loss_mask, out[0], 0.0))


@dataclass(frozen=True)
class _GeoMeanWeighted:
    """verl's geo_mean: given weights enter as the geometric mean of w + 1e-10 (P10)."""

    spec: GeoMean
    needs: ClassVar[frozenset[str]] = GeoMean.needs

    def __call__(self, b: PolicyBatch) -> Any:
        out = self.spec(b)
        if b.weight is None:
            return out
        mean = segment_mean((b.masked("weight") + 1e-10).log(), b.loss_mask, b.cu_seqlens).exp()
        return replace(out, loss=out.loss * mean[b.sequence_index])


def bypass(record: Record) -> Iterator[Attempt]:
    """Bypass mode: proximal is behavior, rejection by the current policy; only REINFORCE applies weights (P13)."""
    own = record.params["policy_loss"]["rollout_correction"]
    padded = policy_rows(record)
    aggregate = aggregate_of(record, padded.mask.shape[1])
    reinforce = own.get("loss_type") == "reinforce"
    spec: Any = Reinforce() if reinforce else PpoClip(*clip_range(record.params))
    for shipped in (False, True):
        chosen: list[Any] = [*documented_rejections(own, "current")]
        if shipped:
            chosen = [*shipped_rejections(own, "current", shipped=True)]
        kept = replace(padded.b, loss_mask=apply_corrections(padded.b, chosen).loss_mask)
        if reinforce and own.get("rollout_is"):
            chosen.append(importance(own, "current"))
        checks = record.loss_checks(step_value(record, run(padded.b, spec, aggregate, chosen or None)), padded.leaf)
        with_empty = filled(padded, proximal=False)
        for more in (None,) if with_empty is None else (None, with_empty):
            numbers = actor_numbers(spec, kept) | correction_numbers(own, padded, more, "current", shipped=shipped)
            yield "P25" if shipped else "P27" if more else None, [*checks, *number_checks(record, numbers)]


def aggregation(record: Record) -> Iterator[Attempt]:
    """core_algos.agg_loss"""
    matrix = record.tensor("loss_mat").requires_grad_()
    b = PolicyBatch.from_padded(record.mask, log_prob=matrix)
    loss = token_loss(record, b.log_prob, b)
    yield None, record.loss_checks(step_value(record, loss), matrix, "grad_loss_mat")


def value_loss(record: Record) -> Iterator[Attempt]:
    """core_algos.compute_value_loss"""
    leaf = record.tensor("vpreds").requires_grad_()
    fields = {"advantage": record.tensor("values"), "behavior_log_prob": record.tensor("returns")}
    b = PolicyBatch.from_padded(record.mask, log_prob=leaf, **fields)
    assert b.advantage is not None and b.behavior_log_prob is not None
    spec = ValueLoss(epsilon=record.params["cliprange_value"])
    token, metrics = spec(b.log_prob, b.advantage, b.behavior_log_prob, b.loss_mask)
    value = step_value(record, token_loss(record, token, b))
    checks = record.loss_checks(value, leaf, "grad_vpreds")
    yield None, [*checks, *record.checks({"vf_clipfrac": metrics["value_clip_fraction"].value}, rtol=1e-6)]


KL_NAMES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_spec(name: str) -> Any:
    """verl's name of a KL estimator → ours, with its clamp of k3 at 10."""
    kind = KL_NAMES[name.removesuffix("+")]
    more = {"limit": 10.0} if kind == "k3" else {}
    return PENALTIES[kind](coefficient=1.0, straight_through=name.endswith("+"), **more)


def kl_penalty(record: Record) -> Iterator[Attempt]:
    """core_algos.kl_penalty, over all positions, masked or not."""
    leaf = record.tensor("logp").requires_grad_()
    kl = kl_spec(record.params["kl_penalty"]).divergence(leaf, record.tensor("reference_logp"))
    (gradient,) = torch.autograd.grad(kl.sum(), leaf, retain_graph=True)
    loose = record.tolerance()
    checks = [record.expect("kl", kl.detach(), **loose), record.expect("grad_sum_kl", gradient, **loose)]
    b = PolicyBatch.from_padded(record.mask, log_prob=kl)
    for mode, numbers in record.expected.get("agg", {}).items():
        aggregated = replace(record, params={"loss_agg_mode": mode})
        value, loose = token_loss(aggregated, b.log_prob, b).value, aggregated.tolerance()
        checks.append(Check(f"agg.{mode}.loss", value.detach(), numbers["loss"], **loose))
        if "grad_logp" in numbers:
            (slope,) = torch.autograd.grad(value, leaf, retain_graph=True)
            checks.append(Check(f"agg.{mode}.grad_logp", slope, numbers["grad_logp"], **loose))
    yield None, checks


def adaptive_kl(record: Record) -> Iterator[Attempt]:
    """core_algos.AdaptiveKLController"""
    p = record.params
    controller, beta, values = AdaptiveCoefficient(p["target_kl"], p["horizon"]), p["init_kl_coef"], []
    for kl, samples in zip(record.inputs["current_kl"], record.inputs["n_steps"], strict=True):
        beta = controller.next(beta, kl, samples)
        values.append(beta)
    yield None, [Check("values", values, record.expected["values"])]


def kl_in_reward(record: Record) -> Iterator[Attempt]:
    """ray_trainer.apply_kl_penalty"""
    p = record.params
    mask = record.mask
    kl = kl_spec(p["kl_penalty"]).divergence(record.tensor("old_log_probs"), record.tensor("reference_logp"))
    kl = torch.where(mask, kl, 0.0)
    rewards = record.tensor("token_level_scores") - p["init_kl_coef"] * kl
    mean = float((kl.sum(1) / mask.sum(1).clamp(min=1)).mean())
    after = AdaptiveCoefficient(p["target_kl"], p["horizon"]).next(p["init_kl_coef"], mean, len(mask))
    checks = [record.expect("token_level_rewards", rewards), record.expect("kl_coef_after", after, 1e-8)]
    # the coefficient before the update (P23)
    metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": p["init_kl_coef"]}
    yield None, [*checks, *record.checks(metrics)]


def whitening(record: Record) -> Iterator[Attempt]:
    """torch_functional.masked_mean, masked_var, masked_whiten; padding goes through the same map (P18)."""
    mask = record.mask
    values = record.tensor("values")
    chosen = values[mask]
    checks = [record.expect("mean", chosen.mean(), 1e-8), record.expect("var", chosen.var(), 1e-7)]
    checks += record.checks({"var_biased": chosen.var(correction=0)}, under="")
    for name, shift in (("whiten", True), ("whiten_noshift", False)):
        ours = torch.zeros_like(values)
        ours[mask] = whiten(chosen, torch.ones(int(mask.sum()), dtype=torch.bool), shift=shift)
        scale = torch.rsqrt(chosen.var() + 1e-8)
        garbage = (values - chosen.mean()) * scale + (0.0 if shift else chosen.mean())
        checks.append(record.expect(name, torch.where(mask, ours, garbage), 1e-7, 1e-8))
    yield None, checks
