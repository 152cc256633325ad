"""verl's rollout correction in its three generations: PR 3694, 0.7 and 0.9."""

from collections.abc import Iterator
from typing import Any

from proxima.core.correction import Importance, Rejection
from proxima.core.loss import Corrections, apply_corrections
from proxima.data import PolicyBatch
from proxima.peers.verify.record import Attempt, Check, Padded, Record
from proxima.peers.verify.verl_mismatch import RAW, masked_numbers, number_checks, policy_numbers, weight_numbers
from proxima.peers.verify.verl_options import correction_numbers, filled, importance, prefixed, readings, rejections_of


def rows(record: Record) -> Padded:
    """Training log-probs are the proximal policy's."""
    training = record.tensor("logp")
    return record.batch(log_prob=training, behavior_log_prob=record.tensor("behavior_logp"), proximal_log_prob=training)


def weight_check(padded: Padded, done: Corrections, record: Record) -> Check:
    """The weights, 0 at padding; None where the options ask for none."""
    weight = None if done.weight is None else padded.rows(done.weight)
    return record.expect("rollout_is_weights", weight, 1e-7, 1e-10)


def pr3694(record: Record) -> Iterator[Attempt]:
    """mismatch_helper.compute_rollout_importance_weights"""
    p = record.params
    padded = rows(record)
    bounds: dict[str, Any] = {"truncate": "truncate", "clip": "clip", "mask": "clip"}
    level, bound = p.get("rollout_is_level", "token"), bounds[p.get("rollout_is_mode", "truncate")]
    upper, lower = p.get("rollout_is_threshold"), p.get("rollout_is_threshold_lower")
    veto = p.get("rollout_is_veto_threshold", 1e-4)
    if upper is None:  # off (P35)
        yield None, [record.expect("rollout_is_weights", None)]
        return
    spec = Importance(level, bound, upper, lower, veto)
    weight = weight_check(padded, apply_corrections(padded.b, [spec]), record)
    for reason, more in _readings(padded, "P35"):
        numbers = prefixed(weight_numbers(spec, padded.b, more, RAW), "rollout_is_") | policy_numbers(padded.b, more)
        numbers |= {name.replace("clipped", "masked"): x for name, x in numbers.items() if "clipped" in name}  # in 0.6
        yield reason, [weight, *number_checks(record, numbers)]


def _readings(padded: Padded, reason: str) -> Iterator[tuple[str | None, PolicyBatch | None]]:
    """Ours, without the empty rows, and verl's, with them where there are any."""
    yield None, None
    if (more := filled(padded)) is not None:
        yield reason, more


def version07(record: Record) -> Iterator[Attempt]:
    """0.7: weights are only truncated, rejection and veto go to the mask."""
    p = record.params
    p.mark_irrelevant("rollout_is_threshold", "rollout_is_batch_normalize")  # without rollout_is
    p.mark_irrelevant("rollout_rs_threshold", "rollout_rs_threshold_lower")  # without rollout_rs
    padded = rows(record)
    weights = [importance(p)] if p.get("rollout_is") else []
    drops: list[Any] = []
    bounded: Importance | None = None
    if (level := p.get("rollout_rs")) is not None:
        high, low = p.get("rollout_rs_threshold", 2.0), p.get("rollout_rs_threshold_lower")
        where: tuple[Any, Any] = ("token" if level == "token" else "sequence", "sum" if level == "sequence" else "mean")
        drops.append(Rejection(where[0], "ratio", where[1], high, 1 / high if low is None else low, "drop"))
        bounded = Importance(level, "none", high, low)
    threshold = p.get("rollout_token_veto_threshold")
    vetoes = [] if threshold is None else [Importance(bound="none", veto=threshold, rejected="drop")]
    checks = _mask_checks(record, padded, weights, [*drops, *vetoes])
    for reason, more in _readings(padded, "P27"):
        numbers = policy_numbers(padded.b, more)
        for spec in weights:
            numbers |= prefixed(weight_numbers(spec, padded.b, more, RAW), "rollout_is_")
        if bounded is not None:
            numbers |= prefixed(weight_numbers(bounded, padded.b, more, RAW, fractions_of_rows=True), "rollout_rs_")
            keep = apply_corrections(padded.b, drops).loss_mask
            numbers |= masked_numbers(padded.b, keep, all_rows=more is not None)
        veto = weight_numbers(vetoes[0] if vetoes else Importance(), padded.b, more, RAW)
        numbers |= {f"rollout_is_{name}": veto[name] for name in ("veto_fraction", "catastrophic_token_fraction")}
        yield reason, [*checks, *number_checks(record, numbers)]


def version09(record: Record) -> Iterator[Attempt]:
    """0.9: compute_rollout_correction_and_rejection_mask"""
    p = record.params
    p.mark_irrelevant(
        "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs_threshold"
    )  # without their kind
    padded = rows(record)
    weights = [importance(p)] if p.get("rollout_is") else []
    for reason, inverted, more in readings(p, padded):
        checks = _mask_checks(record, padded, weights, list(rejections_of(p, inverted=inverted)))
        numbers = correction_numbers(p, padded, more, inverted=inverted)
        yield reason, [*checks, *number_checks(record, numbers)]


def _mask_checks(record: Record, padded: Padded, weights: list[Any], drops: list[Any]) -> list[Check]:
    done = apply_corrections(padded.b, drops)
    kept = done.loss_mask.double()
    for share in (one(padded.b).weight for one in drops if isinstance(one, Rejection)):  # 0 or 1
        kept = kept * share
    mask = padded.rows(kept)
    weight = weight_check(padded, apply_corrections(padded.b, weights), record)
    return [weight, record.expect("modified_response_mask", mask)]
