"""TRL's online trainers: GRPOTrainer and its loss types, GMPO, RLOO, DPPO, PPO, the sampler correction, advantages."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.conformance.by_hand import as_tensor
from proxima.core.aggregate import SequenceMeanTokenMean, SequenceMeanTokenSum, SequenceMeanTokenSumNorm, TokenMean
from proxima.core.correction import Importance, OffPolicySequence, TopEntropy
from proxima.core.loss import Corrected, Loss, policy_loss
from proxima.core.penalty import K3
from proxima.core.ratio import masked_ratio, spread
from proxima.core.segment import segment_count
from proxima.core.surrogate import Cispo, Dppo, GeoMean, Gspo, Luspo, PpoClip, Sapo, Vespo
from proxima.core.surrogate.weight import MIN_LOG_WEIGHT
from proxima.core.value import ValueLoss
from proxima.data import PolicyBatch
from proxima.peers.verify.record import Attempt, Padded, Record
from proxima.peers.verify.trl_metrics import dppo_numbers, gmpo_numbers, grpo_numbers, rloo_numbers
from proxima.peers.verify.verl import Given

SAMPLER_RATIO = ("importance_sampling_ratio", "vllm_importance_sampling_ratio")
TOKEN_NORMALISED = ("dapo", "cispo", "vespo")  # divided by num_items_in_batch


def trl_surrogate(p: dict[str, Any]) -> Any:
    """Our spec for a `loss_type` at its importance level; T2: TRL's epsilon_high of cispo is the cap itself."""
    args = p.get("args", {})
    kind = p.get("loss_type", "grpo")
    low, high, level = p["epsilon_low"], p["epsilon_high"], p.get("importance_sampling_level", "token")
    sequence = level != "token"
    if kind == "cispo":
        return Cispo(1.0, high - 1, level)
    if kind == "sapo":
        # T6: the temperature passes through float32.
        tau = _single(args["sapo_temperature_pos"], args["sapo_temperature_neg"])
        return Sapo(tau[0], tau[1], level)
    if kind == "vespo":  # so do its four numbers
        shape = _single(*(args[f"vespo_{name}"] for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")))
        return Vespo(shape[0], max(shape[1], 1e-4), shape[2], max(shape[3], 1e-4))
    delta = args.get("delta")
    if delta is not None:  # two-sided: our dual clip where A < 0; where A > 0 the nearer of it and the clip (T3)
        high, delta = min(high, delta - 1), max(delta, 1 + high)
    if sequence:
        return (Luspo if kind == "luspo" else Gspo)(low, high, "sequence", delta)
    return PpoClip(low, high, delta)


def _single(*values: float) -> list[float]:
    """Through float32 and back."""
    found: list[float] = torch.tensor(values, dtype=torch.float32).tolist()
    return found


def grpo(record: Record) -> Iterator[Attempt]:
    """GRPOTrainer._compute_loss"""
    record.mark_irrelevant("num_items_in_batch")
    p = record.params
    padded = _batch(record)
    penalty = K3(p["beta"], unbiased=bool(p.get("args", {}).get("use_bias_correction_kl"))) if p.get("beta") else None
    kind = p.get("loss_type", "grpo")
    makers: dict[str, Any] = {
        "grpo": SequenceMeanTokenMean,
        "sapo": SequenceMeanTokenMean,
        "luspo": SequenceMeanTokenSum,
        "dr_grpo": lambda: SequenceMeanTokenSumNorm(p["max_completion_length"]),
    }
    aggregate = makers.get(kind, TokenMean)()
    sampler = next((record.tensor(key) for key in SAMPLER_RATIO if record.has(key)), None)
    metrics = record.checks(grpo_numbers(record, sampler), rtol=1e-6)
    blocks: dict[str, Any] = {"aggregate": aggregate, "correction": _corrections(record) or None, "penalty": penalty}
    ours = policy_loss(padded.b, surrogate=trl_surrogate(p), **blocks, check=False)
    readings: list[tuple[str | None, Loss]] = [(None, ours)]
    if (theirs := _as_they_do(record, padded, aggregate, penalty)) is not None:
        readings.append(theirs)
    for reason, loss in readings:
        for rows in (None,) if kind in (*TOKEN_NORMALISED, "bnpo") else (None, len(padded.mask)):
            value = _value(record, loss, rows) / _accumulation(record)
            yield reason or (None if rows is None else "T1"), [*record.loss_checks(value, padded.leaf), *metrics]


def _as_they_do(record: Record, padded: Padded, aggregate: Any, penalty: Any) -> tuple[str, Loss] | None:
    """The loss as TRL composes sampler ratios, masks, advantages and corrected KL by token; with its peculiarity."""
    p, b = record.params, padded.b
    spec: Any = trl_surrogate(p)
    ratio = _sampler_ratio(record)
    sequence = p.get("importance_sampling_level", "token") != "token"
    reasons = []
    if p.get("loss_type") == "vespo" and ratio is not None:
        total = next(record.tensor(key) for key in SAMPLER_RATIO if record.has(key))
        reasons.append("T7")
        spec = _VespoWithSampler(spec, total.log().clamp(MIN_LOG_WEIGHT, 20.0).sum(1))
    elif sequence and ratio is not None:  # each token of a sequence loss is weighted by its own ratio
        reasons.append("T11")
    if sequence and record.tensor("advantages").dim() == 2 and not isinstance(trl_surrogate(p), Cispo | Vespo):
        reasons.append("A5")  # each token keeps its own advantage
        spec = _OwnAdvantage(spec)
    loss = spec(b).loss
    for one in _corrections(record):
        if isinstance(one, TopEntropy):  # the quantile is float32 there
            reasons.append("T9")
            one = _SingleEntropy(one.share)
        elif isinstance(one, _SampledOffPolicy) and sequence:
            reasons.append("T8")
        loss = loss * one(b).weight
    if penalty is not None:
        if sequence and penalty.unbiased:  # the KL is corrected by the sequence's ratio
            reasons.append("T5")
            loss = loss + replace(penalty, unbiased=False)(b) * masked_ratio(b, "sequence")
        else:
            loss = loss + penalty(b)
    if not reasons:
        return None
    return reasons[0], Loss(aggregate(loss, b), aggregate.denominator(b.loss_mask, b.cu_seqlens), {})


@dataclass(frozen=True)
class _SingleEntropy:
    share: float
    rejected: Literal["count"] = "count"
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})

    def __call__(self, b: PolicyBatch) -> Corrected:
        entropy = b.masked("entropy").detach()
        edge = torch.quantile(entropy[b.loss_mask].float(), 1 - self.share)
        keep = b.loss_mask & (entropy >= edge)
        return Corrected(keep.to(entropy.dtype), keep, {})


@dataclass(frozen=True)
class _VespoWithSampler:
    spec: Vespo
    total: Tensor  # [S] what the sampler adds to log w
    needs: ClassVar[frozenset[str]] = Vespo.needs

    def __call__(self, b: PolicyBatch) -> Any:
        # Moving the proximal policy by a share of it at each loss token adds the whole to log w and changes nothing
        # else.
        share = spread(b, self.total / segment_count(b.loss_mask, b.cu_seqlens).clamp(min=1))
        return self.spec(replace(b, proximal_log_prob=b.masked("proximal_log_prob") - share))


@dataclass(frozen=True)
class _OwnAdvantage:
    spec: Any
    needs: ClassVar[frozenset[str]] = frozenset({"advantage", "proximal_log_prob"})

    def __call__(self, b: PolicyBatch) -> Any:
        spec = self.spec
        if isinstance(spec, Gspo):
            token: Any = PpoClip(spec.epsilon_low, spec.epsilon_high, spec.dual_clip)
        else:
            token = replace(spec, level="token")
        moved = masked_ratio(b, "sequence").log() + b.masked("proximal_log_prob")  # every token at its sequence's ratio
        return token(replace(b, log_prob=moved))


def _accumulation(record: Record) -> float:
    """The accumulation steps, by which TRL divides losses that it means per micro-batch; 1 for the others."""
    p = record.params
    if p.get("loss_type") in TOKEN_NORMALISED or not p.get("training", True):
        return 1.0
    return float(p.get("current_gradient_accumulation_steps", 1))


def _value(record: Record, loss: Loss, rows: int | None) -> Tensor:
    p = record.params
    if p.get("loss_type") in TOKEN_NORMALISED:
        items = float(as_tensor(record.inputs["num_items_in_batch"]))
        steps = p.get("current_gradient_accumulation_steps", 1)
        scale = steps / p.get("args", {}).get("steps_per_generation", 1) if p.get("training", True) else 1.0
        return loss.numerator / (items * scale)
    return loss.value if rows is None else loss.numerator / rows


OPTIONAL = (
    *(("reference_logp", "reference_log_prob"), ("entropies", "entropy")),
    *(("current_topk_logps", "top_k_log_prob"), ("sampling_topk_logps", "behavior_top_k_log_prob")),
)


def _batch(record: Record) -> Padded:
    fields = {"log_prob": record.tensor("logp"), "advantage": record.tensor("advantages")}
    # Without the rollout's log-probs the ratio is 1, with the current policy's gradient (T9).
    fields["behavior_log_prob"] = record.tensor("behavior_logp" if record.has("behavior_logp") else "logp")
    for theirs, ours in OPTIONAL:
        if record.has(theirs):
            fields[ours] = record.tensor(theirs)
    if "behavior_top_k_log_prob" in fields:  # the records hold no ids: as likely as one of the top K is one of them
        top = fields["behavior_top_k_log_prob"]
        fields["token"] = torch.zeros_like(record.mask, dtype=torch.long)
        fields["top_k"] = (
            (fields["behavior_log_prob"][..., None] < top.amin(-1, keepdim=True) - 1e-6).long().expand_as(top)
        )
    return record.batch(**fields)


def _sampler_ratio(record: Record) -> Tensor | None:
    """[N] the sampler's importance ratios, in the record one a token or one a row; None where they are not used."""
    p = record.params
    for key in SAMPLER_RATIO:
        if record.has(key) and p.get("use_vllm", True) and p.get("vllm_importance_sampling_correction", True):
            ratio, like = record.tensor(key), record.tensor("logp")
            return record.batch(log_prob=like, weight=ratio.expand(like.shape).contiguous()).b.weight
    return None


def _corrections(record: Record) -> list[Any]:
    p = record.params
    found: list[Any] = []
    if p.get("loss_type") != "vespo" and (ratio := _sampler_ratio(record)) is not None:
        found.append(Given(ratio))
    if p.get("top_entropy_quantile", 1.0) < 1.0:
        found.append(TopEntropy(p["top_entropy_quantile"]))
    if p.get("off_policy_mask_threshold") is not None:
        found.append(_SampledOffPolicy.of(record, p["off_policy_mask_threshold"]))
    return found


class _SampledOffPolicy:
    """`off_policy_sequence` from the sampler's log-probs where the record has them, else the rollout's (T8)."""

    needs: frozenset[str] = frozenset()
    rejected = "count"

    def __init__(self, threshold: float, sampling: Tensor | None) -> None:
        self.spec, self.sampling = OffPolicySequence(threshold), sampling

    @classmethod
    def of(cls, record: Record, threshold: float) -> "_SampledOffPolicy":
        names = [name for name in ("sampling_logp", "sampling_per_token_logps") if record.has(name)]
        if not names:
            return cls(threshold, None)
        rows = record.batch(log_prob=record.tensor("logp"), behavior_log_prob=record.tensor(names[0]))
        return cls(threshold, rows.b.behavior_log_prob)

    def __call__(self, b: Any) -> Any:
        return self.spec(b if self.sampling is None else replace(b, behavior_log_prob=self.sampling))


def gmpo(record: Record) -> Iterator[Attempt]:
    """Experimental GMPOTrainer._compute_loss: mean over rows."""
    record.mark_irrelevant("num_items_in_batch")
    p = record.params
    padded = _batch(record)
    penalty = K3(p["beta"]) if p.get("beta") else None
    spec = GeoMean(p["epsilon_low"], p["epsilon_high"], "log_ratio")
    loss = policy_loss(padded.b, surrogate=spec, aggregate=SequenceMeanTokenMean(), penalty=penalty, check=False)
    steps = _accumulation(record)
    metrics = record.checks(gmpo_numbers(record), rtol=1e-6)
    yield None, [*record.loss_checks(loss.value / steps, padded.leaf), *metrics]
    yield "T9", [*record.loss_checks(loss.numerator / len(padded.mask) / steps, padded.leaf), *metrics]


def rloo(record: Record) -> Iterator[Attempt]:
    """RLOOTrainer._compute_loss: the clip on the sequence's whole ratio, its loss a mean over sequences."""
    p = record.params
    leaf = record.tensor("logp").requires_grad_()
    mask = record.mask
    gap = torch.where(mask, leaf - record.tensor("behavior_logp"), 0.0).sum(1)
    edges = torch.arange(len(mask) + 1)

    rows = {"loss_mask": torch.ones(len(mask), dtype=torch.bool), "advantage": record.tensor("advantages")}
    b = PolicyBatch(log_prob=gap, behavior_log_prob=torch.zeros_like(gap), cu_seqlens=edges, **rows)
    spec = PpoClip(p["epsilon_low"], p["epsilon_high"])
    value = policy_loss(b, surrogate=spec, aggregate=TokenMean(), check=False).value
    yield None, [*record.loss_checks(value, leaf), *record.checks(rloo_numbers(record), rtol=1e-6)]


def dppo(record: Record) -> Iterator[Attempt]:
    """TRL 1.3 experimental DPPOTrainer: a capped REINFORCE form, divergence mask, mean over tokens."""
    p = record.params
    padded = _batch(record)
    spec = Dppo(p["divergence_type"], p["epsilon_high"], p["epsilon_low"], p["clip_ratio_c"])
    penalty = K3(p["beta"]) if p.get("beta") else None
    loss = policy_loss(padded.b, surrogate=spec, aggregate=TokenMean(), penalty=penalty, check=False)
    keep = padded.rows(loss.keep)
    checks = [*record.loss_checks(loss.value, padded.leaf), record.expect("divergence_mask", keep)]
    yield None, [*checks, *record.checks(dppo_numbers(record, keep != 0), rtol=1e-6)]


def vllm_correction(record: Record) -> Iterator[Attempt]:
    """GRPOTrainer's sampler correction: `mask` is 0 outside inclusive bounds, `truncate` clamps on both sides (T11)."""
    p = record.params
    level, _, mode = p["vllm_importance_sampling_mode"].rpartition("_")
    low, high = p.get("clip_min"), p.get("clip_max")
    proximal, sampling = record.tensor("old_logp"), record.tensor("sampling_logp")
    known = sampling.isfinite() & proximal.isfinite()  # T11: an unavailable log-prob has ratio 1
    proximal, sampling = torch.where(known, proximal, 0.0), torch.where(known, sampling, 0.0)
    padded = record.batch(log_prob=proximal, behavior_log_prob=sampling, proximal_log_prob=proximal)
    bound: Any = "clip" if mode == "mask" else "clamp"
    upper, lower = float("inf") if high is None else high, 0.0 if low is None else low
    spec = Importance(level=level, bound=bound, upper=upper, lower=lower)
    outside = float(spec.bounded(torch.ones(1)))  # padding has ratio 1, bounded like the rest
    theirs = as_tensor(record.expected["importance_sampling_ratio"])
    weight = padded.rows(spec(padded.b).weight, outside)
    if theirs.shape[1] == 1:  # one number a sequence: that of its first token, or of none
        first = padded.mask.long().argmax(1, keepdim=True)
        weight = weight.gather(1, first)
    yield None, [record.expect("importance_sampling_ratio", weight)]


def ppo_loss(record: Record) -> Iterator[Attempt]:
    """TRL 1.3 PPOTrainer: clipped policy and value losses, token means over masks of their own."""
    p = record.params
    padded = _batch(record)
    spec = PpoClip(p["cliprange"], p["cliprange"])
    policy = policy_loss(padded.b, surrogate=spec, aggregate=TokenMean(), check=False).value
    value = record.tensor("vpreds").requires_grad_()
    inside = as_tensor(record.inputs["value_mask"]) != 0
    before, target = record.tensor("values"), record.tensor("returns")
    token, own = ValueLoss(p["cliprange_value"])(value.flatten(), before.flatten(), target.flatten(), inside.flatten())
    critic = token.sum() / inside.sum()
    total = policy + p["vf_coef"] * critic
    (gradient,) = torch.autograd.grad(total, value, retain_graph=True)
    numbers = {"loss": total.detach(), "pg_loss": policy.detach(), "vf_loss": critic.detach(), "grad_vpreds": gradient}
    checks = [record.expect(name, number) for name, number in numbers.items()]
    checks += record.checks({"vf_clipfrac": own["value_clip_fraction"].value}, under="", rtol=1e-6)
    yield None, [*checks, record.expect("grad_logp", padded.gradient(total))]
