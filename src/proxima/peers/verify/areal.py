"""AReaL: decoupled PPO with rejection, SAPO, M2PO's mask, proximal interpolation, GAE, normalisation, critic."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.conformance.by_hand import as_tensor
from proxima.core.advantage import Gae, Grpo, Rloo, TokenRewards
from proxima.core.advantage.group import standardised
from proxima.core.advantage.token import place_scores, with_kl
from proxima.core.aggregate import TokenMean
from proxima.core.correction import Importance, Rejection, SecondMoment
from proxima.core.loss import Corrected, policy_loss
from proxima.core.penalty import K1, K2, K3
from proxima.core.proximal import interpolated_proximal
from proxima.core.surrogate import Gspo, PpoClip, Sapo
from proxima.core.value import ValueLoss
from proxima.data import Outcomes, PolicyBatch
from proxima.peers.verify.areal_stats import ppo_numbers, sapo_numbers
from proxima.peers.verify.record import Attempt, Padded, Record
from proxima.peers.verify.verl_advantage import carried

ESTIMATORS: dict[str, Any] = {"k1": K1(1.0), "k2": K2(1.0), "k3": K3(1.0)}


@dataclass(frozen=True)
class Swapped:
    """A rejection with behavior and proximal policy swapped: AReaL's k1 and k3 are of the reciprocal ratio (A3)."""

    spec: Rejection
    rejected: Literal["count"] = "count"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, b: PolicyBatch) -> Corrected:
        return self.spec(replace(b, proximal_log_prob=b.behavior_log_prob, behavior_log_prob=b.proximal_log_prob))


@dataclass(frozen=True)
class ClampedByAggregate:
    """Geometric weights, clamped only in sequences whose aggregated ratio is out of bounds (A2)."""

    reduce: str
    upper: float
    lower: float
    rejected: Literal["count"] = "count"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, b: PolicyBatch) -> Corrected:
        tested = Rejection("sequence", "ratio", self.reduce, self.upper, self.lower)(b)  # type: ignore[arg-type]
        weight = Importance("geometric", "none")(b).weight
        weight = torch.where(tested.keep, weight, torch.where(b.loss_mask, weight.clamp(self.lower, self.upper), 0.0))
        return Corrected(weight, b.loss_mask, {})


def corrections_of(options: dict[str, Any] | None) -> Iterator[tuple[str | None, list[Any]]]:
    """Our corrections for RejectionSamplingConfig, then the readings under its peculiarities."""
    if options is None:
        yield None, []
        return
    level, reduce, upper = options["level"], options["agg"], options["upper"]
    lower = options["lower"] if options["lower"] is not None else (0.0 if options["metric"] == "ratio" else None)
    weights: Any = "token" if level == "token" else "geometric"
    if options["action"] == "clamp":
        yield None, [Importance(weights, "clamp", upper=upper, lower=lower)]
        if level == "sequence":
            yield "A2", [ClampedByAggregate(reduce, upper, lower or 0.0)]
        return
    kind: Any = options["metric"].removeprefix("kl_")
    if kind != "ratio" and lower is None:
        lower = -float("inf")
    rule = Rejection(level, kind, reduce, upper, lower)
    if kind != "ratio":
        weights = "token"  # geometric weights go with the ratio alone
    yield None, [rule, Importance(weights, "none")]
    if kind in ("k1", "k3"):
        yield "A3", [Swapped(rule), Importance(weights, "none")]


def ppo(record: Record) -> Iterator[Attempt]:
    """functional.ppo_actor_loss_fn: PPO clip on π/π_prox times the behavior weight, over the original mask (A1)."""
    p = record.params
    padded = _rows(record, record.tensor("prox_logp"))
    sequence = p.get("importance_sampling_level") == "sequence"
    low, high = p["eps_clip"], p["eps_clip"] if p.get("eps_clip_higher") is None else p["eps_clip_higher"]
    spec: Any = Gspo(low, high, "sequence") if sequence else PpoClip(low, high, p.get("c_clip"))
    options = p.get("rejection_sampling")
    loose = record.tolerance() if options is None else {"rtol": 2e-6, "atol": 1e-7}  # behave weights are float32 (A6)
    for reason, corrections in corrections_of(options):
        loss = policy_loss(padded.b, surrogate=spec, aggregate=TokenMean(), correction=corrections or None, check=False)
        numbers = ppo_numbers(record, padded, (low, high, p.get("c_clip")), corrections, sequence=sequence)
        stats = record.checks(numbers, "stats.", **loose)
        yield reason, [*record.loss_checks(loss.value, padded.leaf, tolerance=loose), *stats]
        if sequence and corrections:
            value = _on_kept_tokens(padded.b, spec, corrections)
            yield "A5", [*record.loss_checks(value, padded.leaf, tolerance=loose), *stats]


def _on_kept_tokens(b: PolicyBatch, spec: Any, corrections: list[Any]) -> Tensor:
    """The sequence ratio over the tokens left by rejection, token weights one by one, the original denominator (A5)."""
    keep, weight = b.loss_mask, torch.ones_like(b.log_prob)
    for one in (correction(b) for correction in corrections):
        keep, weight = keep & one.keep, weight * one.weight
    token = spec(replace(b, loss_mask=keep))
    return torch.where(keep, token.loss * weight, 0.0).sum() / b.loss_mask.sum()


def _rows(record: Record, proximal: Tensor) -> Padded:
    return record.actor_batch(proximal_log_prob=proximal)


def sapo(record: Record) -> Iterator[Attempt]:
    """functional.sapo_loss_fn"""
    p = record.params
    padded = _rows(record, record.tensor("behavior_logp"))
    spec = Sapo(p["tau_pos"], p["tau_neg"], p["importance_sampling_level"])
    loss = policy_loss(padded.b, surrogate=spec, aggregate=TokenMean(), check=False)
    stats = record.checks(sapo_numbers(record, padded, spec), "stats.", **record.tolerance())
    yield None, [*record.loss_checks(loss.value, padded.leaf), *stats]


def second_moment(record: Record) -> Iterator[Attempt]:
    """actor._apply_m2po_masking"""
    before = record.tensor("prox_logp")
    padded = record.batch(log_prob=before, behavior_log_prob=record.tensor("behavior_logp"), proximal_log_prob=before)
    keep = SecondMoment(record.params["m2_threshold"])(padded.b).keep
    yield None, [record.expect("mask", padded.rows(keep))]


def proximal_interpolation(record: Record) -> Iterator[Attempt]:
    """actor.compute_prox_logp_approximations; a in float32."""
    record.mark_irrelevant("mask", "versions")
    p = record.params
    behavior, current = record.tensor("behavior_logp"), record.tensor("logp")
    ours = behavior
    if p["method"] != "rollout":
        versions = torch.tensor(record.inputs["versions"])
        ours = interpolated_proximal(behavior, current, versions, p["current_version"], p["method"])
    yield None, [record.expect("prox_logp", ours, 1e-5, 1e-5)]


def kl_estimate(record: Record) -> Iterator[Attempt]:
    """data.KLEstimator"""
    record.mark_irrelevant("mask")
    p = record.params
    limit = 10.0 if p["apply_clamp"] else float("inf")
    gap = record.tensor("logp") - record.tensor("reference_logp")
    yield None, [record.expect("kl", ESTIMATORS[p["kl_estimator"]].estimate(gap).clamp(-limit, limit), 2e-6, 2e-7)]


def areal_advantages(record: Record) -> Iterator[Attempt]:
    """PPOActor._compute_advantages: everything is at the position that predicts, one to the left of the token (A7)."""
    p = record.params
    attention = as_tensor(record.inputs["attention_mask"]) != 0
    rows, width = attention.shape
    mask = (as_tensor(record.inputs["loss_mask"]) != 0).roll(-1, 1)
    mask[:, -1] = False
    score = (as_tensor(record.inputs["rewards"]) + p["reward_bias"]) * p["reward_scaling"]
    score = score.clamp(-p["reward_clip"], p["reward_clip"])
    behavior = torch.where(mask, as_tensor(record.inputs["logprobs"]).roll(-1, 1), 0.0)
    reference = torch.where(mask, as_tensor(record.inputs["ref_logp"]), 0.0)
    estimate = ESTIMATORS[p["kl_estimator"]].estimate(behavior - reference).clamp(-10, 10)
    length = attention.sum(1)
    before_last = torch.arange(width) <= (length - 2)[:, None]
    edges = torch.arange(rows + 1) * width
    endless = length == width  # no end token
    if p.get("mask_no_eos_with_zero"):
        score = torch.where(endless, 0.0, score)
    reward = place_scores(score, before_last.flatten(), edges)
    reward = with_kl(reward, estimate.flatten(), mask.flatten(), p["kl_ctl"])
    value = as_tensor(record.inputs["values"])
    last = torch.where(endless, value[:, -1], 0.0)  # bootstrapped without an end token
    flat = {"reward": reward, "value": value.flatten(), "loss_mask": mask.flatten()}
    rewards = TokenRewards(**flat, cu_seqlens=edges, bootstrap=last)
    gae = Gae(p["discount"], p["gae_lambda"], whiten=False)
    ours = gae(rewards)
    raw = carried(ours.view(rows, width), mask)  # beyond the mask the recursion carries the next token's along
    if p["adv_norm"] is not None:
        raw = standardised(ours, mask.flatten(), 1e-5).view(rows, width)
    numbers = {
        "tot_rewards": reward.view(rows, width),
        "kl_rewards": -p["kl_ctl"] * torch.where(mask, estimate, 0.0),
        "returns": carried(ours.view(rows, width), mask) + value,
        "advantages": raw,
        "loss_mask": mask.double(),
        "logprobs": behavior,
    }
    yield None, record.checks(numbers, "", 2e-5, 2e-6)


def masked_normalization(record: Record) -> Iterator[Attempt]:
    """functional.masked_normalization; ours has the unbiased standard deviation (A7)."""
    p = record.params
    mask = record.mask
    values = record.tensor("values")
    chosen = values[mask]
    ours = standardised(values.flatten(), mask.flatten(), p["eps"]).view(mask.shape)
    for reason, std, inside in ((None, chosen.std(), ours), ("A7", chosen.std(correction=0), None)):
        everywhere = (torch.where(mask, values, 0.0) - chosen.mean()) / (std + p["eps"])  # padding counts as 0 there
        out = everywhere if inside is None else torch.where(mask, inside, everywhere)
        yield reason, [record.expect("out", out, 2e-6, 1e-6)]


def normalization(record: Record) -> Iterator[Attempt]:
    """data.Normalization of rewards."""
    p = record.params
    x = as_tensor(record.inputs["x"])
    size = p.get("group_size") or len(x)
    group = torch.arange(len(x)) // (size if p["mean_level"] == "group" else len(x))
    o = Outcomes.of(x, group)
    scale: Any = {"group": "group", "batch": "batch", None: "none"}[p.get("std_level")]
    spec: Any = Rloo() if p.get("mean_leave1out") else Grpo(scale, p["eps"])
    yield None, [record.expect("out", spec(o), 2e-6, 1e-6)]
    if scale != "none":
        parts = x.split(size) if scale == "group" else (x,)
        centred = torch.cat([part - part.mean() for part in x.split(size)])
        std = torch.cat([part.std(unbiased=False).expand(len(part)) for part in parts])
        yield "A7", [record.expect("out", centred / (std + p["eps"]), 2e-6, 1e-6)]
    if scale == "batch":  # the batch's standard deviation of what is left after centring by group
        yield "A7", [record.expect("out", centred / (centred.std() + p["eps"]), 2e-6, 1e-6)]


def critic_loss(record: Record) -> Iterator[Attempt]:
    """functional.ppo_critic_loss_fn"""
    p = record.params
    mask = record.mask
    leaf = record.tensor("vpreds").requires_grad_()
    error: Any = {"mse": "squared", "huber": "huber"}[p["loss_fn_type"]]
    spec = ValueLoss(p["value_eps_clip"], error)
    flat = [x.flatten() for x in (leaf, record.tensor("values"), record.tensor("returns"), mask)]
    token, _ = spec(*flat)
    loss = token.sum() / mask.sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    unbounded, _ = replace(spec, epsilon=float("inf"))(*flat)
    numbers = {"loss": loss.detach(), "grad_vpreds": gradient, "clip_mask": (token > unbounded).view(mask.shape)}
    yield None, record.checks(numbers, "", 2e-5, 2e-6)
