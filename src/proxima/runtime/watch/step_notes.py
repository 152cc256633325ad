"""Notes on finished steps, from their times and their lines of metrics.jsonl: the time left, a busy machine, and why a
step trained nothing."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

RECENT = 3  # steps: enough to average over one that is long by chance, few enough to notice a machine that became busy
BUSY_SHARE = 0.25
LEAST_SECONDS = 6.0  # of threads that run or wait for a core, within these steps: less says nothing about the machine

VARIED = "use questions that are neither always right nor always wrong, or more completions per prompt"
DROPPED = "dropped/"  # completions, by reason


def seconds_left(step_seconds: Sequence[float], steps: int) -> float | None:
    """Estimate the seconds of training left, without evaluations: the mean of the last steps times those to come.
    None before the first step.

    Args:
        step_seconds: of all finished steps.
        steps: that are left.
    """
    if step_seconds:
        return statistics.mean(step_seconds[-RECENT:]) * steps
    return None


class CoreShare:
    """Warns once that the threads of a run wait for cores that other work uses."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._warned = False

    def add(self, running: float, waiting: float) -> str:
        """Add the seconds that the threads of a step ran, and waited for a core. Return a warning, or nothing."""
        self._recent.append((running, waiting))
        waited = sum(wait for _, wait in self._recent)
        total = sum(running + wait for running, wait in self._recent)
        if self._warned or len(self._recent) < RECENT or total < LEAST_SECONDS or waited <= BUSY_SHARE * total:
            return ""
        self._warned = True
        return (
            f"this run's threads waited for a core {waited / total:.0%} of the time in the last {RECENT} steps: "
            "other processes keep this machine busy and slow the steps down"
        )


def why_untrained(record: Mapping[str, Any]) -> str:
    """Why a step had no gradient: one clause, with a remedy. `record` is its line of metrics.jsonl."""
    if not record.get("updates"):
        return _no_update(record)
    if "examples" in record:
        return "the gradient was 0: its examples teach nothing"
    if not record.get("tokens/trained"):
        mean = record.get("reward/mean")
        if mean is None:
            return f"every advantage was 0; {VARIED}"
        return f"every advantage was 0 (mean reward {mean:.3g}); {VARIED}"
    if (record.get("correction/rejected_fraction") or 0.0) >= 1.0:
        return "algorithm.correction rejected every token; widen its bounds, and look at mismatch/ in metrics.jsonl"
    if (record.get("masked_fraction") or 0.0) >= 1.0:
        return "algorithm.surrogate masked every token; widen its trust region, or lower train.updates_per_step"
    return "the gradient was 0"


def _no_update(record: Mapping[str, Any]) -> str:
    if record.get("prompts_used"):
        return "only the critic was trained; lower critic.value_warmup_steps"
    named = ", ".join(
        f"{count} {key.removeprefix(DROPPED)}" for key, count in record.items() if key.startswith(DROPPED)
    )
    return f"nothing was left to train on ({named or 'no groups'}); the weights did not change"
