"""verl's rollout correction in three generations (PR 3694, 0.7 and 0.9): our specs for its options, and its metrics."""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from proxima.core.correction.importance import Importance
from proxima.core.correction.rejection import Rejection
from proxima.core.loss import apply_corrections
from proxima.core.metrics import Metrics
from proxima.data.policy_batch import PolicyBatch
from proxima_peers.verify.record import Attempt, Check, Padded, Record, Tracked, UnsupportedRecord
from proxima_peers.verify.variants import reasons
from proxima_peers.verify.verl_metrics import (
    APPLIED,
    RAW,
    ReportedRejection,
    masked_numbers,
    number_checks,
    policy_numbers,
    weight_numbers,
)


def threshold_bounds(threshold: Any) -> tuple[float | None, float]:
    """Lower and upper bound; verl writes "lo_hi", or only the upper bound."""
    low, _, high = str(threshold).partition("_")
    if high:
        return float(low), float(high)
    return None, float(low)


def importance(options: Tracked, towards: Any = "proximal") -> Importance:
    """`rollout_is` of verl 0.9: an upper bound truncates, two bounds are IcePop."""
    low, high = threshold_bounds(options.get("rollout_is_threshold", 2.0))
    bound: Any = "truncate" if low is None else "clip"
    normalise = bool(options.get("rollout_is_batch_normalize"))
    return Importance(options["rollout_is"], bound, high, low, normalise=normalise, towards=towards)


def rejection_rules(options: Tracked) -> Iterator[tuple[dict[str, Any], str, float | None, float]]:
    """The comma-separated rules in `rollout_rs` of verl 0.9: level and reduction, statistic, and bounds as written."""
    names = [name.strip() for name in (options.get("rollout_rs") or "").split(",") if name.strip()]
    given = options.get("rollout_rs_threshold")
    limits = []
    if given is not None:
        limits = [limit.strip() for limit in str(given).split(",")]
    if len(limits) == 1:
        limits = limits * len(names)
    if names and len(limits) != len(names):
        counts = f"rollout_rs has {len(names)} statistics, rollout_rs_threshold={given!r} {len(limits)} bounds"
        raise UnsupportedRecord(counts)
    for name, limit in zip(names, limits, strict=False):
        level, *reduce, kind = name.replace("seq_", "sequence_").split("_")
        low, high = threshold_bounds(limit)
        if kind == "k1" and low is None:
            low = 1 / high
        how = {"level": level, "reduce": "mean"}
        if reduce:
            how["reduce"] = reduce[0]
        yield how, kind, low, high


def rejections_of(options: Tracked, towards: Any = "proximal", *, inverted: bool) -> list[Rejection]:
    """Our rejections for `rollout_rs`. `inverted`: k1's bounds act on the reciprocal of the documented ratio (P25)."""
    rejections = []
    for how, kind, low, high in rejection_rules(options):
        statistic: Any = "ratio" if kind == "k1" else kind
        if kind == "k1" and inverted:
            assert low is not None
            low, high = 1 / high, 1 / low
        rejection = Rejection(statistic=statistic, upper=high, lower=low, rejected="drop", towards=towards, **how)
        rejections.append(rejection)
    return rejections


def reported_rejections(options: Tracked, towards: Any = "proximal", *, inverted: bool) -> list[ReportedRejection]:
    """The statistics that 0.9 reports: k1 = −log ratio with its bounds, as documented or, if `inverted`, as run."""
    rejections = []
    for how, kind, low, high in rejection_rules(options):
        if kind == "k1":
            assert low is not None
            if inverted:
                low, high = math.log(low), math.log(high)
            else:
                low, high = -math.log(high), -math.log(low)
        statistic: Any = kind
        rejections.append(ReportedRejection(Rejection(statistic=statistic, towards=towards, **how), low, high))
    return rejections


def readings(
    options: Tracked, padded: Padded, *, proximal: bool = True
) -> Iterator[tuple[str | None, bool, PolicyBatch | None]]:
    """Our reading, then verl's where it differs: reason, True if k1's bounds are inverted (P25), and the batch from
    `filled` if empty rows count (P27)."""
    directions = [False]
    if any(kind == "k1" and _is_uneven(low, high) for _, kind, low, high in rejection_rules(options)):
        directions.append(True)
    batches: list[PolicyBatch | None] = [None]
    more = filled(padded, proximal=proximal)
    if more is not None:
        batches.append(more)
    for inverted in directions:
        for rows in batches:
            yield reasons(P25=inverted, P27=rows is not None), inverted, rows


def _is_uneven(low: float | None, high: float) -> bool:
    """Return True if the bounds of a ratio are not those of its reciprocal."""
    assert low is not None
    return abs(low * high - 1) > 1e-9


def filled(padded: Padded, *, proximal: bool = True) -> PolicyBatch | None:
    """The batch with a token of log-prob 0 under both policies in each empty row; None if no row is empty.

    `proximal`: the training log-probs are also the proximal policy's; else only the current policy's."""
    empty = ~padded.mask.any(1)
    if not bool(empty.any()):
        return None
    b = padded.b
    assert b.behavior_log_prob is not None
    mask = padded.mask.clone()
    mask[empty, 0] = True
    training = padded.rows(b.log_prob)
    behavior = padded.rows(b.behavior_log_prob)
    if proximal:
        return Padded.of(mask, log_prob=training, behavior_log_prob=behavior, proximal_log_prob=training).b
    return Padded.of(mask, log_prob=training, behavior_log_prob=behavior).b


def prefixed(numbers: Metrics, prefix: str) -> Metrics:
    """The numbers with `prefix` before their bare names."""
    return {prefix + name: metric for name, metric in numbers.items()}


def correction_numbers(
    options: Tracked, padded: Padded, more: PolicyBatch | None, towards: Any = "proximal", *, inverted: bool
) -> Metrics:
    """All metrics that 0.9 reports for its options; `inverted` and `more` as from `readings`."""
    b = padded.b
    numbers = policy_numbers(b, more, towards)
    if options.get("rollout_is"):
        weighing = weight_numbers(importance(options, towards), b, more, APPLIED)
        numbers |= prefixed(weighing, "rollout_is_")
    keep: Tensor = b.loss_mask
    for rejection in reported_rejections(options, towards, inverted=inverted):
        numbers |= prefixed(rejection.numbers(b), f"rollout_rs_{rejection.rule.name}_")
        keep = keep & rejection.keep(b)
    return numbers | masked_numbers(b, keep, all_rows=more is not None)


def rows(record: Record) -> Padded:
    """The batch of a record; its training log-probs are also the proximal policy's."""
    training = record.tensor("logp")
    return record.batch(log_prob=training, behavior_log_prob=record.tensor("behavior_logp"), proximal_log_prob=training)


def weight_check(padded: Padded, b: PolicyBatch, record: Record) -> Check:
    """A check of the weights, 0 at padding; None if the options request none."""
    weight = None if b.weight is None else padded.rows(b.weight)
    return record.expect("rollout_is_weights", weight, 1e-7, 1e-10)


def pr3694(record: Record) -> Iterator[Attempt]:
    """mismatch_helper.compute_rollout_importance_weights"""
    p = record.params
    padded = rows(record)
    bounds: dict[str, Any] = {"truncate": "truncate", "clip": "clip", "mask": "clip"}
    level = p.get("rollout_is_level", "token")
    bound = bounds[p.get("rollout_is_mode", "truncate")]
    upper = p.get("rollout_is_threshold")
    lower = p.get("rollout_is_threshold_lower")
    veto = p.get("rollout_is_veto_threshold", 1e-4)
    if upper is None:  # off (P35)
        yield None, [record.expect("rollout_is_weights", None)]
        return
    spec = Importance(level, bound, upper, lower, veto)
    weight = weight_check(padded, apply_corrections(padded.b, [spec])[0], record)
    for reason, more in _readings(padded, "P35"):
        weighing = weight_numbers(spec, padded.b, more, RAW)
        numbers = prefixed(weighing, "rollout_is_") | policy_numbers(padded.b, more)
        numbers |= {name.replace("clipped", "masked"): x for name, x in numbers.items() if "clipped" in name}  # in 0.6
        yield reason, [weight, *number_checks(record, numbers)]


def _readings(padded: Padded, reason: str) -> Iterator[tuple[str | None, PolicyBatch | None]]:
    """Our reading, without the empty rows, and verl's, which counts them, if there are any."""
    yield None, None
    more = filled(padded)
    if more is not None:
        yield reason, more


def version07(record: Record) -> Iterator[Attempt]:
    """0.7: weights are only truncated; rejection and veto change the mask."""
    p = record.params
    p.mark_irrelevant("rollout_is_threshold", "rollout_is_batch_normalize")  # without rollout_is
    p.mark_irrelevant("rollout_rs_threshold", "rollout_rs_threshold_lower")  # without rollout_rs
    padded = rows(record)
    weights = [importance(p)] if p.get("rollout_is") else []
    drops: list[Any] = []
    bounded: Importance | None = None
    level = p.get("rollout_rs")
    if level is not None:
        high = p.get("rollout_rs_threshold", 2.0)
        low = p.get("rollout_rs_threshold_lower")
        drops.append(_rejection07(level, high, low))
        bounded = Importance(level, "none", high, low)
    veto = Importance()
    vetoes = []
    threshold = p.get("rollout_token_veto_threshold")
    if threshold is not None:
        veto = Importance(bound="none", veto=threshold, rejected="drop")
        vetoes = [veto]
    checks = _mask_checks(record, padded, weights, [*drops, *vetoes])
    for reason, more in _readings(padded, "P27"):
        numbers = policy_numbers(padded.b, more)
        for spec in weights:
            numbers |= prefixed(weight_numbers(spec, padded.b, more, RAW), "rollout_is_")
        if bounded is not None:
            numbers |= prefixed(weight_numbers(bounded, padded.b, more, RAW, fractions_of_rows=True), "rollout_rs_")
            keep = apply_corrections(padded.b, drops)[0].loss_mask
            numbers |= masked_numbers(padded.b, keep, all_rows=more is not None)
        fractions = weight_numbers(veto, padded.b, more, RAW)
        numbers |= {f"rollout_is_{name}": fractions[name] for name in ("veto_fraction", "catastrophic_token_fraction")}
        yield reason, [*checks, *number_checks(record, numbers)]


def _rejection07(level: str, high: float, low: float | None) -> Rejection:
    """0.7's rejection of tokens, or of sequences by the sum of their log-ratios, or, where geometric, by the mean."""
    if low is None:
        low = 1 / high
    if level == "token":
        return Rejection("token", "ratio", "mean", high, low, "drop")
    if level == "sequence":
        return Rejection("sequence", "ratio", "sum", high, low, "drop")
    return Rejection("sequence", "ratio", "mean", high, low, "drop")


def version09(record: Record) -> Iterator[Attempt]:
    """0.9: compute_rollout_correction_and_rejection_mask"""
    p = record.params
    # without their kind
    p.mark_irrelevant("rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs_threshold")
    padded = rows(record)
    weights = [importance(p)] if p.get("rollout_is") else []
    for reason, inverted, more in readings(p, padded):
        checks = _mask_checks(record, padded, weights, list(rejections_of(p, inverted=inverted)))
        yield reason, [*checks, *number_checks(record, correction_numbers(p, padded, more, inverted=inverted))]


def _mask_checks(record: Record, padded: Padded, weights: list[Any], drops: list[Any]) -> list[Check]:
    kept = apply_corrections(padded.b, drops)[0].loss_mask.double()
    for rejection in drops:
        if isinstance(rejection, Rejection):
            kept = kept * rejection(padded.b).weight  # 0 or 1
    mask = padded.rows(kept)
    weight = weight_check(padded, apply_corrections(padded.b, weights)[0], record)
    return [weight, record.expect("modified_response_mask", mask)]
