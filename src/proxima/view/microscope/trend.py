"""The curves of a run as its page draws them: every number of its steps, its evaluations, and what the recipe chose."""

from collections.abc import Mapping, Sequence
from typing import Any

from proxima.core.correction.guard import MismatchGuard
from proxima.core.correction.health import verdicts
from proxima.data import FieldError
from proxima.evaluation.headline import Headline
from proxima.view.microscope.metric_meanings import metric_meanings

SLOTS = ("surrogate", "advantage", "correction", "aggregate", "proximal", "reference_kl", "penalty", "selection")


def trend_of(records: Sequence[Mapping[str, Any]], algorithm: Mapping[str, Any], after: int = 0) -> dict[str, Any]:
    """Return every number in records of metrics.jsonl for the steps after `after`, with group and meaning, the verdict
    on it where it has an ideal range, and the number of earlier steps; also the evaluations, and the specs in the
    `algorithm` of the recipe."""
    steps = [record for record in records if record["kind"] == "train"]
    train = [record for record in steps if record["step"] > after]
    evals = [record for record in records if record["kind"] == "eval"]
    named = {name for record in train for name, value in record.items() if _is_number(value)} - {"step"}
    about = metric_meanings(named)
    guard = guard_of(algorithm)
    judged = [verdicts(record, guard) for record in train]
    with_verdict = {name for of_step in judged for name in of_step} & named
    return {
        "before": len(steps) - len(train),
        "steps": [record["step"] for record in train],
        "metrics": {
            name: [record.get(name) if _is_number(record.get(name)) else None for record in train] for name in about
        },
        "about": about,
        "verdicts": {name: [of_step.get(name) for of_step in judged] for name in sorted(with_verdict)},
        "evals": [
            {
                "step": r["step"],
                "label": str(r.get("label", "")),
                "metrics": {k: v for k, v in r.items() if _is_number(v)},
            }
            for r in evals
        ],
        "specs": {name: algorithm.get(name) for name in SLOTS},
        "headline": Headline.of(evals).key,
    }


def guard_of(algorithm: Any) -> MismatchGuard:
    """Return the guard that the `algorithm` of a recipe sets; the default one if it is missing or damaged."""
    fields = algorithm.get("mismatch") if isinstance(algorithm, Mapping) else None
    try:
        return MismatchGuard(**fields) if isinstance(fields, Mapping) else MismatchGuard()
    except (TypeError, FieldError):
        return MismatchGuard()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
