"""verl's rollout correction in its three generations: PR 3694, 0.7 and 0.9."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from proxima.core.correction import Importance, Rejection
from proxima.core.loss import Corrections, apply_corrections
from proxima.core.metrics import Metrics
from proxima.core.verify.record import Attempt, Check, Padded, Record, as_tensor
from proxima.core.verify.verl import importance, rejections

# What each generation calls a statistic of ours. The first reports unbounded weights, its std and ESS of bounded ones (P32); the later ones
# report the weights they apply (P28), at token level, and the sequence-level maximum and minimum of the raw ones.
POLICY_NAMES = {
    "training_ppl": "training_ppl",
    "training_log_ppl": "training_log_ppl",
    "rollout_ppl": "rollout_ppl",
    "rollout_log_ppl": "rollout_log_ppl",
    "kl": "kl",
    "k3_kl": "k3_kl",
    "ppl_ratio": "ppl_ratio",
    "log_ppl_diff": "log_ppl_diff",
    "log_ppl_abs_diff": "log_ppl_diff_abs",
    "log_ppl_diff_max": "log_ppl_diff_max",
    "log_ppl_diff_min": "log_ppl_diff_min",
    "chi2_token": "chi2_token",
    "chi2_seq": "chi2_seq",
}
RAW_NAMES = {
    name: name
    for name in (
        "rollout_is_mean",
        "rollout_is_max",
        "rollout_is_min",
        "rollout_is_ratio_fraction_high",
        "rollout_is_ratio_fraction_low",
        "rollout_is_seq_mean",
        "rollout_is_seq_std",
        "rollout_is_seq_max",
        "rollout_is_seq_min",
        "rollout_is_seq_max_deviation",
        "rollout_is_seq_fraction_high",
        "rollout_is_seq_fraction_low",
        "rollout_is_p25",
        "rollout_is_p50",
        "rollout_is_p75",
        "rollout_is_p95",
        "rollout_is_p99",
        "rollout_is_veto_fraction",
        "rollout_is_catastrophic_token_fraction",
        "rollout_is_clipped_fraction",
        "rollout_is_seq_clipped_fraction",
    )
} | {"rollout_is_std": "rollout_is_std_bounded", "rollout_is_eff_sample_size": "rollout_is_eff_sample_size_bounded"}
STD = ("_std", "eff_sample_size")


APPLIED = ("mean", "std", "eff_sample_size", "seq_mean", "seq_std", "seq_max", "seq_min", "seq_max_deviation")


def applied_names(level: str | None) -> dict[str, str]:
    """0.9: statistics of the weights applied, before normalisation; a whole sequence's extremes and all fractions are of raw ones (P28)."""
    names = {f"rollout_is_{name}": f"rollout_is_{name}_applied" for name in APPLIED}
    for name in ("max", "min"):
        names[f"rollout_is_{name}"] = f"rollout_is_{name}_applied" if level == "token" else f"rollout_is_{name}"
    for name in ("ratio_fraction_high", "ratio_fraction_low", "seq_fraction_high", "seq_fraction_low", "batch_norm_factor"):
        names[f"rollout_is_{name}"] = f"rollout_is_{name}"
    return names


def rows(record: Record) -> Padded:
    """Training log-probs are the proximal policy's."""
    training = record.tensor("logp")
    return record.batch(log_prob=training, behavior_log_prob=record.tensor("behavior_logp"), proximal_log_prob=training)


def metric_checks(record: Record, ours: Metrics, names: dict[str, str], skip: tuple[str, ...] = ()) -> list[Check]:
    """One check for each of the record's metrics that `names` knows. Indicator means are float32 there; `*_std` carries P32's noise."""
    checks = []
    for full, value in (record.expected.get("metrics") or {}).items():
        name = full.split("/", 1)[1].removeprefix("mismatch_")
        if name not in names or name in skip or f"mismatch/{names[name]}" not in ours:
            continue
        own = ours[f"mismatch/{names[name]}"].value
        atol = 1e-4 * max(1.0, abs(float(as_tensor(record.expected["metrics"].get(_largest(full), 1.0))))) if name.endswith(STD) else 1e-8
        checks.append(Check(name, own, value, 2e-6 if not name.endswith(STD) else 1e-4, atol))
    return checks


def _largest(full: str) -> str:
    """The name of the maximum that stands beside a standard deviation."""
    return full.rsplit("_", 1)[0] + "_max"


def weight_check(padded: Padded, done: Corrections, record: Record) -> list[Check]:
    theirs = record.expected["rollout_is_weights"]
    if theirs is None:
        return []
    weight = padded.rows(done.weight) if done.weight is not None else padded.mask.double()
    return [Check("rollout_is_weights", weight, torch.where(padded.mask, as_tensor(theirs), 0.0), 1e-7, 1e-10)]


def mask_check(padded: Padded, loss_mask: Tensor, record: Record) -> list[Check]:
    return [Check("modified_response_mask", padded.rows(loss_mask), as_tensor(record.expected["modified_response_mask"]))]


def pr3694(record: Record) -> Iterator[Attempt]:
    """mismatch_helper.compute_rollout_importance_weights"""
    p = record.params
    padded = rows(record)
    lower = p["rollout_is_threshold_lower"]
    spec = Importance(
        level=p["rollout_is_level"],
        bound=p["rollout_is_mode"].replace("mask", "clip"),
        upper=p["rollout_is_threshold"],
        lower=lower,
        veto=p["rollout_is_veto_threshold"],
    )
    done = apply_corrections(padded.b, [spec])
    skip: tuple[str, ...] = (
        () if p["rollout_is_veto_threshold"] is not None else ("rollout_is_catastrophic_token_fraction", "rollout_is_veto_fraction")
    )
    checks = weight_check(padded, done, record)
    yield None, [*checks, *metric_checks(record, done.metrics, RAW_NAMES | POLICY_NAMES, skip)]
    if bool((~padded.mask).all(1).any()):  # rows without a token: verl averages them in as ratio 1
        per_token = {
            key: name for key, name in (RAW_NAMES | POLICY_NAMES).items() if key in ("rollout_is_mean", "kl", "k3_kl", "rollout_is_p50")
        }
        yield "P35", [*checks, *metric_checks(record, done.metrics, per_token, skip)]


def version07(record: Record) -> Iterator[Attempt]:
    """0.7: weights are only truncated, rejection and veto go to the mask."""
    p = record.params
    padded = rows(record)
    corrections: list[Any] = []
    if p.get("rollout_is"):
        corrections.append(importance(p))
    drops: list[Any] = []
    if p.get("rollout_rs"):
        high = p["rollout_rs_threshold"]
        low = p.get("rollout_rs_threshold_lower")
        level, reduce = {"token": ("token", "mean"), "sequence": ("sequence", "sum"), "geometric": ("sequence", "mean")}[p["rollout_rs"]]
        drops.append(Rejection(level, "ratio", reduce, high, 1 / high if low is None else low, "drop"))  # type: ignore[arg-type]
    if p.get("rollout_token_veto_threshold") is not None:
        drops.append(Importance(bound="none", veto=p["rollout_token_veto_threshold"], rejected="drop"))
    yield from _weights_and_mask(record, padded, corrections, drops)


def version09(record: Record) -> Iterator[Attempt]:
    """0.9: compute_rollout_correction_and_rejection_mask"""
    p = record.params
    padded = rows(record)
    corrections = [importance(p)] if p.get("rollout_is") else []
    yield from _weights_and_mask(record, padded, corrections, rejections(p))
    if p.get("rollout_rs"):
        for reason, attempt in _weights_and_mask(record, padded, corrections, rejections(p, shipped=True)):
            yield reason or "P25", attempt


def _weights_and_mask(record: Record, padded: Padded, weights: list[Any], drops: list[Any]) -> Iterator[Attempt]:
    b = padded.b
    weighted = apply_corrections(b, weights)
    loss_mask = apply_corrections(b, drops).loss_mask
    statistics = weights[0](b).metrics if weights else Importance(apply=False)(b).metrics
    for drop in drops:  # a veto's own statistics come from the spec that vetoes
        if isinstance(drop, Importance):
            statistics |= {
                key: value for key, value in drop(b).metrics.items() if key.endswith(("veto_fraction", "catastrophic_token_fraction"))
            }
    checks = [*weight_check(padded, weighted, record), *mask_check(padded, loss_mask, record)]
    names = POLICY_NAMES | (applied_names(record.params.get("rollout_is")) if "0.9" in record.source else RAW_NAMES)
    yield None, [*checks, *metric_checks(record, statistics, names)]
    if bool((~padded.mask).all(1).any()):
        yield "P27", [*checks, *metric_checks(record, statistics, {key: key for key in ("kl", "k3_kl", "chi2_token")})]
