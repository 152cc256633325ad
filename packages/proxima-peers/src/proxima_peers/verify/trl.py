"""TRL's GRPOTrainer and its loss types, and GSPOTokenTrainer."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from proxima.core.aggregate import SequenceMeanTokenMean, SequenceMeanTokenSum, SequenceMeanTokenSumNorm, TokenMean
from proxima.core.correction.rejection import OffPolicySequence, TopEntropy
from proxima.core.loss import Corrected, Loss
from proxima.core.penalty import K3
from proxima.core.ratio import masked_log_ratio, masked_ratio, spread
from proxima.core.segment import segment_count
from proxima.core.surrogate.clip import Gspo, Luspo, PpoClip
from proxima.core.surrogate.weight import MIN_LOG_WEIGHT, Cispo, Sapo, Vespo
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.by_hand import as_tensor
from proxima_peers.verify.record import Attempt, Padded, Record, Tracked, UnsupportedRecord
from proxima_peers.verify.trl_metrics import epsilons, grpo_numbers
from proxima_peers.verify.variants import Changed, beyond_limit, given_weights, loss_of

SAMPLER_RATIO = ("importance_sampling_ratio", "vllm_importance_sampling_ratio")
TOKEN_NORMALISED = ("dapo", "cispo", "vespo")  # divided by num_items_in_batch
ARGS = (
    "delta",
    "use_bias_correction_kl",
    "steps_per_generation",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)
# Options that a trainer accepts; they don't affect a loss that does not read them.
OPTIONS = (
    "loss_type",
    "importance_sampling_level",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    "use_vllm",
    "vllm_importance_sampling_correction",
    "max_completion_length",
    "current_gradient_accumulation_steps",
    "training",
    *ARGS,
    *(f"args.{name}" for name in ARGS),
)
REFUSED = ("entropy_coef", "use_adaptive_entropy", "aux_loss_enabled", "router_aux_loss_coef")


def option(p: Tracked, name: str, default: Any = None) -> Any:
    """An option of the trainer, possibly nested in `args`."""
    return p.section("args").get(name, p.get(name, default))


def trl_surrogate(p: Tracked) -> Any:
    """Our spec for a `loss_type` at its importance level; T2: TRL's epsilon_high of cispo is the cap itself."""
    kind = p.get("loss_type", "dapo")
    low, high = epsilons(p)
    level = p.get("importance_sampling_level", "token")
    if level not in ("token", "sequence", "sequence_token"):
        raise UnsupportedRecord(f"no reading of importance_sampling_level {level!r}")
    if kind == "cispo":
        return Cispo(1.0, high - 1, level)
    if kind == "sapo":
        # T6: the temperature passes through float32.
        tau = _single(option(p, "sapo_temperature_pos", 1.0), option(p, "sapo_temperature_neg", 1.05))
        return Sapo(tau[0], tau[1], level)
    if kind == "vespo":  # so do its four numbers
        defaults = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
        shape = _single(*(option(p, f"vespo_{name}", default) for name, default in defaults.items()))
        return Vespo(shape[0], max(shape[1], 1e-4), shape[2], max(shape[3], 1e-4))
    low = min(low, 1.0)  # a ratio is positive
    delta = option(p, "delta")
    if delta is not None:  # two-sided: our dual clip where A < 0; where A > 0, the lower of delta and the clip (T3)
        clip = 1 + high
        high = min(high, delta - 1)
        delta = max(delta, clip)
    if level == "token":
        return PpoClip(low, high, delta)
    form: Any = "token" if level == "sequence_token" else "sequence"
    if kind == "luspo":
        return Luspo(low, high, form, delta)
    return Gspo(low, high, form, delta)


def _single(*values: float) -> list[float]:
    """Round to float32 and convert back."""
    rounded: list[float] = torch.tensor(values, dtype=torch.float32).tolist()
    return rounded


AGGREGATES: dict[str, Any] = {
    "grpo": lambda p: SequenceMeanTokenMean(),
    "sapo": lambda p: SequenceMeanTokenMean(),
    "luspo": lambda p: SequenceMeanTokenSum(),
    "dr_grpo": lambda p: SequenceMeanTokenSumNorm(p.get("max_completion_length", 512)),
    **dict.fromkeys(("bnpo", *TOKEN_NORMALISED), lambda p: TokenMean()),
}


def grpo(record: Record) -> Iterator[Attempt]:
    """GRPOTrainer._compute_loss"""
    record = without_tools(record)
    p = record.params
    kind = p.get("loss_type", "dapo")
    beta = p.get("beta", 0.0)
    if kind not in AGGREGATES:
        raise UnsupportedRecord(f"no reading of loss_type {kind!r}")
    refuse_more(p)
    padded = rows_of(record)
    spec = trl_surrogate(p)
    aggregate = AGGREGATES[kind](p)
    penalty = None
    if beta:
        penalty = K3(beta, unbiased=bool(option(p, "use_bias_correction_kl", True)))
    corrections = _corrections(record)
    sampler = next((record.tensor(key) for key in SAMPLER_RATIO if record.has(key)), None)
    metrics = record.checks(grpo_numbers(record, sampler))
    p.mark_irrelevant(*OPTIONS)
    record.inputs.mark_irrelevant("sampling_logp", "sampling_per_token_logps", "reference_logp", *SAMPLER_RATIO)
    ours = loss_of(padded.b, spec, aggregate, corrections, penalty)
    yield None, [*record.loss_checks(value_of(record, ours, None), padded.leaf), *metrics]
    triggers = _triggers(record, padded, spec, corrections, penalty)
    for size in range(1, len(triggers) + 1):
        for changes in combinations(triggers, size):
            loss = _changed(record, padded, (spec, aggregate, penalty), corrections, changes)
            rows = len(padded.mask) if "T1" in changes else None
            value = value_of(record, loss, rows)
            yield ", ".join(changes), [*record.loss_checks(value, padded.leaf), *metrics]


def refuse_more(p: Tracked) -> None:
    """Refuse a record whose loss has terms that ours lacks."""
    for name in REFUSED:
        if option(p, name):
            raise UnsupportedRecord(f"no reading of {name}={option(p, name)!r}")


def without_tools(record: Record) -> Record:
    """The record with the tokens of tools removed from the mask."""
    if not record.has("tool_mask"):
        return record
    mask = record.mask & (as_tensor(record.inputs["tool_mask"]) != 0)
    inputs = Tracked({**record.inputs, "mask": mask.double()})
    inputs.seen = record.inputs.seen
    return replace(record, inputs=inputs)


def _triggers(record: Record, padded: Padded, spec: Any, corrections: list[Any], penalty: Any) -> list[str]:
    """The peculiarities whose trigger is in the record."""
    p = record.params
    b = padded.b
    kind = p.get("loss_type", "dapo")
    sequence = p.get("importance_sampling_level", "token") == "sequence"
    by_row = advantages_by_row(record)
    causes = {
        "T1": kind not in (*TOKEN_NORMALISED, "bnpo") and not bool(padded.mask.any(1).all()),
        "T4": kind != "vespo" and beyond_limit(masked_log_ratio(b)),
        "T5": sequence and penalty is not None and penalty.unbiased,
        "T7": kind == "vespo" and any(record.has(key) for key in SAMPLER_RATIO),
        "T8": not by_row and any(map(_is_off_policy, corrections)),
        "T9": any(isinstance(correction, TopEntropy) for correction in corrections),  # TRL's quantile is float32
        "T11": sequence and len(corrections) > 0,  # the weights of tokens multiply a sequence's loss one by one
        "A5": sequence and not by_row and not isinstance(spec, Cispo | Vespo),  # each token keeps its own advantage
    }
    return [name for name, there in causes.items() if there]


def advantages_by_row(record: Record) -> bool:
    """Return True if the record has one advantage per row."""
    return record.tensor("advantages").dim() == 1


def _changed(
    record: Record, padded: Padded, specs: tuple[Any, Any, Any], corrections: list[Any], changes: tuple[str, ...]
) -> Loss:
    """The loss of our specs with the peculiarities `changes`."""
    b = padded.b
    spec, aggregate, penalty = specs
    if "T7" in changes:
        total = next(record.tensor(key) for key in SAMPLER_RATIO if record.has(key))
        spec = Changed(_with_sampler, spec, total.log().clamp(MIN_LOG_WEIGHT, 20.0).sum(1))
    if "A5" in changes:
        spec = Changed(_own_advantage, spec)
    if "T9" in changes:
        corrections = [_in_single_precision(correction) for correction in corrections]
        if "T8" in changes:
            corrections = [_of_both_signs(correction) for correction in corrections]
    if "T11" in changes:
        spec = Changed(lambda of_sequence, b: replace(of_sequence(b), unit="token"), spec)
    if "T5" in changes:
        penalty = Changed(_by_sequence, penalty)
    return loss_of(b, spec, aggregate, corrections, penalty, bounded="T4" not in changes)


def _in_single_precision(correction: Any) -> Any:
    """`top_entropy` as in TRL; any other correction as it is."""
    if isinstance(correction, TopEntropy):
        return Changed(single_entropy, correction.share)
    return correction


def _of_both_signs(correction: Any) -> Any:
    """The off-policy mask as in TRL; any other correction as it is."""
    if _is_off_policy(correction):
        return Changed(_by_token, correction)
    return correction


def _by_sequence(spec: K3, b: PolicyBatch) -> Tensor:
    """The KL, corrected by the sequence's ratio (T5)."""
    return replace(spec, unbiased=False)(b) * masked_ratio(b, "sequence")


def _by_token(spec: Any, b: PolicyBatch) -> Corrected:
    """The off-policy mask if a row has advantages of both signs: it drops only tokens of negative advantage (T8)."""
    assert b.advantage is not None
    drop = ~spec(replace(b, advantage=-torch.ones_like(b.advantage))).keep & (b.advantage < 0)
    keep = b.loss_mask & ~drop
    return Corrected(keep.to(b.log_prob.dtype), keep, {})


def single_entropy(share: float, b: PolicyBatch) -> Corrected:
    """The top entropies, where the entropies are compared to a quantile computed in float32 (T9)."""
    entropy = b.masked("entropy").detach()
    ours = TopEntropy(share)(replace(b, entropy=entropy.float()))
    edge = torch.quantile(entropy[b.loss_mask].float(), 1 - share)
    keep = ours.keep & (entropy >= edge)
    return Corrected(ours.weight * keep, keep, {})


def _with_sampler(spec: Vespo, total: Tensor, b: PolicyBatch) -> Any:
    """Add `total` [S] to log w, by moving the proximal log-prob of each loss token by an equal share of it."""
    share = spread(b, total / segment_count(b.loss_mask, b.cu_seqlens).clamp(min=1))
    return spec(replace(b, proximal_log_prob=b.masked("proximal_log_prob") - share))


def _own_advantage(spec: Any, b: PolicyBatch) -> Any:
    """Every token as a separate sequence, with its sequence's ratio and its own advantage (A5)."""
    moved = masked_ratio(b, "sequence").log() + b.masked("proximal_log_prob")
    return spec(replace(b, log_prob=moved, cu_seqlens=torch.arange(len(moved) + 1), group=None))


def accumulation(p: Tracked) -> float:
    """The accumulation steps, by which TRL divides losses that are means per micro-batch; 1 in evaluation."""
    steps = float(p.get("current_gradient_accumulation_steps", 1))
    return steps if p.get("training", True) else 1.0


def value_of(record: Record, loss: Loss, rows: int | None) -> Tensor:
    """The loss with TRL's denominator; `rows`: divide by all rows, including those without a token (T1)."""
    p = record.params
    steps = accumulation(p)
    if p.get("loss_type", "dapo") not in TOKEN_NORMALISED:
        record.inputs.mark_irrelevant("num_items_in_batch")
        value = loss.value if rows is None else loss.numerator / rows
        return value / steps
    items = max(1.0, float(as_tensor(record.inputs["num_items_in_batch"])))
    share = option(p, "steps_per_generation", 1) if p.get("training", True) else 1
    return loss.numerator / (items * steps / share)


OPTIONAL = {  # inputs of a record → fields of our batch
    "reference_logp": "reference_log_prob",
    "entropies": "entropy",
    "current_topk_logps": "top_k_log_prob",
    "sampling_topk_logps": "behavior_top_k_log_prob",
}


def rows_of(record: Record) -> Padded:
    fields = {"log_prob": record.tensor("logp"), "advantage": record.tensor("advantages")}
    # Without the rollout's log-probs the ratio is 1, with the current policy's gradient (T9).
    behavior = "behavior_logp" if record.has("behavior_logp") else "logp"
    fields["behavior_log_prob"] = record.tensor(behavior)
    for theirs, ours in OPTIONAL.items():
        if record.has(theirs):
            fields[ours] = record.tensor(theirs)
    if "behavior_top_k_log_prob" in fields:  # the records have no ids: a token as likely as the top K counts as one
        top = fields["behavior_top_k_log_prob"]
        fields["token"] = torch.zeros_like(record.mask, dtype=torch.long)
        outside = fields["behavior_log_prob"][..., None] < top.amin(-1, keepdim=True) - 1e-6
        fields["top_k"] = outside.long().expand_as(top)
    return record.batch(**fields)


def _sampler_ratio(record: Record) -> Tensor | None:
    """[N] the sampler's importance ratios, in the record one per token or row; None if they are not used."""
    p = record.params
    for key in SAMPLER_RATIO:
        if record.has(key) and p.get("use_vllm", True) and p.get("vllm_importance_sampling_correction", True):
            like = record.tensor("logp")
            ratio = record.tensor(key).expand(like.shape).contiguous()
            return record.batch(log_prob=like, weight=ratio).b.weight
    return None


def _corrections(record: Record) -> list[Any]:
    p = record.params
    corrections: list[Any] = []
    ratio = _sampler_ratio(record) if p.get("loss_type") != "vespo" else None
    if ratio is not None:
        corrections.append(Changed(given_weights, ratio))
    share = p.get("top_entropy_quantile", 1.0)
    if share < 1.0:
        corrections.append(TopEntropy(share))
    threshold = p.get("off_policy_mask_threshold")
    if threshold is not None:
        corrections.append(_off_policy(record, threshold))
    return corrections


def _off_policy(record: Record, threshold: float) -> Any:
    """`off_policy_sequence` from the sampler's log-probs if the record has them, else from the rollout's (T8)."""
    spec = OffPolicySequence(threshold)
    names = [name for name in ("sampling_logp", "sampling_per_token_logps") if record.has(name)]
    if not names:
        return spec
    rows = record.batch(log_prob=record.tensor("logp"), behavior_log_prob=record.tensor(names[0]))
    return Changed(_sampled, spec, rows.b.behavior_log_prob)


def _sampled(spec: OffPolicySequence, sampling: Tensor, b: PolicyBatch) -> Corrected:
    return spec(replace(b, behavior_log_prob=sampling))


def _is_off_policy(correction: Any) -> bool:
    return isinstance(correction, OffPolicySequence) or getattr(correction, "func", None) is _sampled
