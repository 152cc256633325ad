"""Why a step had no gradient, from its line of metrics.jsonl."""

from collections.abc import Mapping
from typing import Any

VARIED = "use questions that are neither always right nor always wrong, or more completions per prompt"
DROPPED = "dropped/"  # completions, by reason


def why_untrained(record: Mapping[str, Any]) -> str:
    """One clause, with a remedy; `record` is that of a step without a gradient."""
    if not record.get("updates"):
        return _no_update(record)
    if "examples" in record:
        return "the gradient was 0: its examples teach nothing"
    if not record.get("tokens/trained"):
        mean = record.get("reward/mean")
        return f"every advantage was 0{'' if mean is None else f' (mean reward {mean:.3g})'}; {VARIED}"
    if (record.get("correction/rejected_fraction") or 0.0) >= 1.0:
        return "algorithm.correction rejected every token; widen its bounds, and look at mismatch/ in metrics.jsonl"
    if (record.get("masked_fraction") or 0.0) >= 1.0:
        return "algorithm.surrogate masked every token; widen its trust region, or lower train.updates_per_step"
    return "the gradient was 0"


def _no_update(record: Mapping[str, Any]) -> str:
    if record.get("prompts_used"):
        return "only the critic was trained; lower critic.value_warmup_steps"
    dropped = {key.removeprefix(DROPPED): count for key, count in record.items() if key.startswith(DROPPED)}
    named = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    return f"nothing was left to train on ({named or 'no groups'}); the weights did not change"
