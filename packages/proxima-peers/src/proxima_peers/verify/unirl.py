"""UniRL's packed losses and its normalisers."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core.advantage.group import Grpo
from proxima.core.aggregate import SequenceMeanTokenMean, SequenceMeanTokenSumNorm, TokenMean
from proxima.core.metrics import Spread, k2, k3
from proxima.core.ratio import LOG_RATIO_LIMIT
from proxima.core.segment import segment_mean
from proxima.core.surrogate.clip import Gspo, PpoClip
from proxima.core.surrogate.cppo import Cppo, Dppo
from proxima.core.surrogate.drpo import Drpo, Spo
from proxima.data.outcomes import Outcomes
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.by_hand import as_tensor
from proxima_peers.verify.record import Attempt, Check, Record, Tracked, UnsupportedRecord
from proxima_peers.verify.variants import Changed, beyond_limit, beyond_ten, clamped_at_ten, loss_of, masked, reasons

ALGORITHMS = ("CPPO", "DPPO", "DRPO", "GSPO", "GRPO")
CLIP_RANGES = {"GSPO": 3e-4, "GRPO": 1e-4}
DECAYS: dict[str, Callable[[float], float]] = {
    "linear_decay": lambda progress: 1 - 0.5 * progress,
    "cosine_decay": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}


def unirl_surrogate(p: dict[str, Any], kind: str | None = None) -> Any:
    """Our spec for the options of a UniRL algorithm, which without `kind` is recognised by its option names."""
    kind = kind or next((name for name in ALGORITHMS if f"{name.lower()}_{FIELDS.get(name)}" in p), None)
    if kind == "CPPO":
        return Cppo(p.get("cppo_delta", 0.2), p.get("cppo_w_min", 0.8), p.get("cppo_delta_b", 0.02))
    if kind == "DPPO":
        return Dppo("binary_tv", p.get("dppo_delta", 0.15))
    if kind == "DRPO":
        weighted = p.get("penalty_mu_weighted", True)
        epsilon = p.get("drpo_epsilon", 12.5)
        return Drpo(epsilon) if weighted else Spo(epsilon)
    if kind not in CLIP_RANGES:
        return None
    low, high = clip_ranges(p, kind)
    low = min(low, 1.0)  # a ratio is positive
    if kind == "GSPO":
        return Gspo(low, high, "sequence")
    return PpoClip(low, high)


def clip_ranges(p: dict[str, Any], kind: str) -> tuple[float, float]:
    """The clip range below and above at the current progress of its schedule; UniRL keeps the range constant under a
    schedule of an unknown name."""
    low = p.get("clip_range", CLIP_RANGES[kind])
    high = p.get("clip_range_high")
    if high is None:
        high = low
    decay = DECAYS.get(p.get("clip_schedule", "constant"))
    progress = p.get("training_progress")
    if decay is None:
        return low, high
    if progress is None:
        raise UnsupportedRecord(f"no reading of clip_schedule={p['clip_schedule']!r} without a training_progress")
    share = decay(float(progress))
    return low * share, high * share


FIELDS = {"CPPO": "delta", "DPPO": "delta", "DRPO": "epsilon"}  # the field by which an algorithm is recognised


def concatenated(rows: list[Any]) -> Tensor:
    """Concatenate rows of any length."""
    return torch.cat([as_tensor(row) for row in rows])


def unirl_batch(record: Record) -> tuple[PolicyBatch, Tensor]:
    """The packed batch, and its log-probs, which require a gradient."""
    dtype = torch.float32 if record.single else torch.float64
    lengths = torch.tensor([len(row) for row in record.inputs["logp"]])
    leaf = concatenated(record.inputs["logp"]).to(dtype).requires_grad_()
    advantage = as_tensor(record.inputs["advantages"]).to(dtype).repeat_interleave(lengths)
    mask = torch.ones_like(leaf, dtype=torch.bool)
    if record.has("loss_mask"):
        mask = concatenated(record.inputs["loss_mask"]) != 0
    fields = {"behavior_log_prob": concatenated(record.inputs["behavior_logp"]).to(dtype), "advantage": advantage}
    edges = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return PolicyBatch(log_prob=leaf, **fields, loss_mask=mask, cu_seqlens=edges), leaf


def losses(record: Record) -> Iterator[Attempt]:
    """algorithms/*.py: compute_loss_and_backward"""
    p = record.params
    kind = next(name for name in ALGORITHMS if f" {name}." in record.source)
    b, leaf = unirl_batch(record)
    if record.has("training_progress"):  # in some records an argument next to the batch
        p = Tracked({**p, "training_progress": record.inputs["training_progress"]})
        p.seen = record.params.seen
    spec = unirl_surrogate(p, kind)
    clip_range = clip_ranges(p, kind)[0] if kind in CLIP_RANGES else None
    # Options of the other algorithms, and of features that a stub stage lacks, have no effect.
    p.mark_irrelevant("horizon", "sampling_temperature", "training_progress", "stage_attr", "conditions_cls")
    if p.get("old_logp_source", "rollout") != "rollout":
        raise UnsupportedRecord(f"no reading of old_logp_source={p['old_logp_source']!r}")
    mode = p.get("loss_agg_mode", "token-mean")
    makers: dict[str, Any] = {"token-mean": TokenMean, "seq-mean-token-mean": SequenceMeanTokenMean}
    makers["seq-mean-token-sum-norm"] = lambda: SequenceMeanTokenSumNorm(p.get("horizon", 8192))
    if kind == "GSPO":  # always a mean over sequences
        mode = "seq-mean-token-mean"
    elif mode == "seq-mean-token-mean" and kind != "GRPO":
        mode = "token-mean"  # UniRL's fallback for a mode that the algorithm does not know
    aggregate: Any = makers[mode]()
    every = replace(b, loss_mask=torch.ones_like(b.loss_mask))  # mask and metrics ignore the loss mask (U7)
    single = None
    if isinstance(spec, (Cppo, Dppo)):
        single = _with_single_mask(record, spec, every)
    limits = [False]
    far = kind == "GRPO" and beyond_limit(b.log_prob - _known(b.behavior_log_prob))
    if far or (isinstance(spec, Gspo) and beyond_ten(every)):
        limits.append(True)
    variants: list[tuple[Any, Tensor]] = [(spec, spec(every).keep)]
    if single is not None:
        variants.append(single)
    masked = not bool(b.loss_mask.all())
    counted = len(leaf) if mode == "token-mean" else len(b.cu_seqlens) - 1
    empty = masked or bool((b.cu_seqlens.diff() == 0).any())
    for variant, keep in variants:
        for reason, batch, of_all in _readings(b, every, kind, mode, masked=masked, empty=empty):
            for limit in limits:
                bare: Any = variant
                if limit and isinstance(variant, Gspo):
                    bare = Changed(clamped_at_ten, variant)
                loss = loss_of(batch, bare, aggregate, bounded=not limit)
                denominator = torch.tensor(counted) if of_all else loss.denominator
                value = loss.numerator / denominator
                checks = _checks(record, b, spec, leaf, value, keep, clip_range)
                yield reasons(reason, U6=limit, U1=variant is not spec), checks


def _known(values: Tensor | None) -> Tensor:
    assert values is not None
    return values


def _readings(
    b: PolicyBatch, every: PolicyBatch, kind: str, mode: str, *, masked: bool, empty: bool
) -> Iterator[tuple[str | None, PolicyBatch, bool]]:
    """Reason, batch, and True if the denominator counts everything: tokens outside the loss, rows without a token."""
    yield None, b, False
    if masked and kind in CLIP_RANGES:  # these two ignore the loss mask
        yield "U3", every, False
        if empty and mode != "token-mean" and kind == "GRPO":
            yield "U3, U4", every, True
    elif masked and mode == "token-mean":
        yield "U3", b, True
    elif masked or (empty and mode != "token-mean" and kind != "GSPO"):
        yield "U4", b, True


def _with_single_mask(record: Record, spec: Any, every: PolicyBatch) -> tuple[Any, Tensor] | None:
    """Our spec with its mask computed in float32, and that mask; None if it equals the mask in the record's dtype."""
    mu = _known(every.behavior_log_prob).float()
    fields = {"log_prob": every.log_prob.detach().float(), "behavior_log_prob": mu, "proximal_log_prob": mu}
    keep = spec(replace(every, **fields, advantage=_known(every.advantage).float())).keep
    if bool((keep == spec(every).keep).all()):
        return None
    return Changed(masked, spec, keep), keep


def _checks(
    record: Record, b: PolicyBatch, spec: Any, leaf: Tensor, value: Tensor, keep: Tensor, clip_range: float | None
) -> list[Check]:
    """The checks of a loss and its metrics; `clip_range`: as reported by the algorithms that clip."""
    theirs = replace(record, expected={**record.expected, "grad_logp": concatenated(record.expected["grad_logp"])})
    checks = theirs.loss_checks(value, leaf)
    if "keep" in record.expected:
        checks.append(Check("keep", keep.double(), concatenated(record.expected["keep"])))
    numbers: dict[str, Any] = {"policy_loss": value.detach()}
    if isinstance(spec, Cppo):
        numbers["cppo_delta"] = spec.delta
    elif isinstance(spec, Dppo):
        numbers["dppo_delta"] = spec.delta
    elif isinstance(spec, Drpo | Spo):
        numbers["drpo_epsilon"] = spec.epsilon
    else:
        numbers["clip_range"] = clip_range
    numbers |= numbers_of(spec, b, keep)
    return [*checks, *record.checks(numbers, atol=1e-9)]


@torch.no_grad()
def numbers_of(spec: Any, b: PolicyBatch, keep: Tensor) -> dict[str, Any]:
    """The metrics that an algorithm of UniRL reports, over all packed tokens, or sequences for GSPO."""
    assert b.behavior_log_prob is not None
    gap = b.log_prob - b.behavior_log_prob
    numbers: dict[str, Any] = {
        "rollout_replay_logp_absdiff_mean": gap.abs().mean(),
        "rollout_replay_logp_absdiff_max": gap.abs().max(),
    }
    if isinstance(spec, (Gspo, PpoClip)):
        if isinstance(spec, Gspo):
            numbers |= _k3_numbers(b)
            some = b.cu_seqlens.diff() > 0
            gap = segment_mean(gap, torch.ones_like(b.loss_mask), b.cu_seqlens)[some].clamp(max=10.0)
        return numbers | _clip_numbers(gap, spec)
    gap = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = gap.exp()
    numbers |= {"ratio_mean": ratio.mean(), "ratio_max": ratio.max(), "approx_kl": k3(gap).mean()}
    if isinstance(spec, (Drpo, Spo)):
        numbers |= _pull_numbers(spec, b, ratio)
    else:
        numbers["masked_fraction"] = 1 - keep.double().mean()
    return numbers


def _clip_numbers(gap: Tensor, spec: Any) -> dict[str, Any]:
    """Metrics of the clipped ratio, and k2 of its log (U6)."""
    ratio = gap.exp()
    above = ratio - 1 > spec.epsilon_high
    below = 1 - ratio > spec.epsilon_low
    spread = ratio.std() if len(ratio) > 1 else 0.0
    return {
        "ratio_mean": ratio.mean(),
        "ratio_std": spread,
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "clip_fraction": (above | below).double().mean(),
        "clipfrac_gt_one": above.double().mean(),
        "clipfrac_lt_one": below.double().mean(),
        "approx_kl": k2(gap).mean(),
    }


def _k3_numbers(b: PolicyBatch) -> dict[str, Any]:
    """Statistics of the tokens' k3 in float32."""
    assert b.behavior_log_prob is not None
    values = k3((b.log_prob.float() - b.behavior_log_prob.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    numbers: dict[str, Any] = {"k3_mean": values.mean(), "k3_max": values.max()}
    if len(values) > 1:
        numbers |= {f"k3_p{share}": torch.quantile(values, share / 100) for share in (90, 99)}
    return numbers


def _pull_numbers(spec: Any, b: PolicyBatch, ratio: Tensor) -> dict[str, Any]:
    """DRPO's penalty, and the shares of ratios beyond 1 ± ε / μ (SPO: 1 ± ε)."""
    assert b.advantage is not None and b.behavior_log_prob is not None
    if isinstance(spec, Drpo):
        weight = b.behavior_log_prob.exp()
    else:
        weight = torch.ones_like(ratio)
    reach = spec.epsilon / weight
    return {
        "drpo_penalty_mean": (b.advantage.abs() * weight * (ratio - 1).square() / (2 * spec.epsilon)).mean(),
        "clipfrac_upper": (ratio > 1 + reach).double().mean(),
        "clipfrac_lower": (ratio < 1 - reach).double().mean(),
    }


def normalizers(record: Record) -> Iterator[Attempt]:
    """normalizers.normalize_grouped, normalize_global: (r − mean) / (std + ε), ddof = 1."""
    p = record.params
    reward = as_tensor(record.inputs["rewards"])
    members = record.inputs.get("group_indices")
    group = torch.zeros(len(reward), dtype=torch.long)
    epsilon = p.get("epsilon", 1e-8)
    share = 0.0
    scale: Any = "group"
    if members is not None:
        for label, rows in enumerate(members):
            group[rows] = label
        share = p.get("trim_outliers_ratio", 0.0)
        if p.get("use_global_std", False):
            scale = "batch"
    if share > 0:
        std = reward.std() if scale == "batch" else None
        ours = trimmed(reward, group, share, std, epsilon)
    else:
        ours = Grpo(scale, epsilon)(Outcomes.of(reward, group))
    if p.get("clip_max") is not None:
        ours = ours.clamp(-p["clip_max"], p["clip_max"])
    yield None, [record.expect("advantages", ours, 1e-7, 1e-9)]


def trimmed(reward: Tensor, group: Tensor, share: float, std: Tensor | None, epsilon: float) -> Tensor:
    """[S] all rewards standardised; each group's mean and deviation exclude `share` of its rewards at either end."""
    out = torch.zeros_like(reward)
    for label in group.unique():
        members = group == label
        ordered = reward[members].sort().values
        cut = int(len(ordered) * share)
        if len(ordered) > 2 and 2 * cut < len(ordered):
            inner = ordered[cut : len(ordered) - cut]
        else:
            inner = ordered
        spread = Spread.over(inner, torch.ones_like(inner, dtype=torch.bool), "sample_std")
        deviation = spread.value if std is None else std
        out[members] = (reward[members] - spread.mean) / (deviation + epsilon)
    return out
