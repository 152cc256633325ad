"""Figures of a mismatch, over answers: mean, signed mean, 99th percentile, and how far one setting moves them.

ρ = log π − log μ of a token, nats: π of the trainer, μ of the engine. Answers are resampled, never single tokens,
because the tokens of one answer depend on one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proxima.data.columns import Floats
from proxima.evaluation.intervals import Interval, bootstrap_mean, resampled_indices

SEED = 0  # of the resampling
REPLICATES = 1000  # of the percentile
FLOOR = 1e-4  # nats a token: less is the rounding of float32
SHARE = 0.1  # of the recipe's own mismatch: less is not worth a setting


@dataclass(frozen=True, kw_only=True)
class MismatchFigures:
    """How far an engine's log-probs are from the trainer's, with 95 % intervals over the answers.

    Args:
        mean: |ρ|, nats a token, each answer's mean weighing the same.
        signed: ρ, nats a token.
        p99: the 99th percentile of |ρ| over all tokens, nats.
        answer: |Σ ρ| of an answer, nats.
        weight: exp(ρ); 1 if the tokens were drawn from what the engine reports, and the trainer's π is another policy.
        outside: share of the tokens that can't be drawn from the stated distribution by the trainer's logits.
    """

    mean: Interval
    signed: Interval
    p99: Interval
    answer: Interval
    weight: Interval
    outside: float = 0.0


def mismatch(log_ratios: Sequence[Floats]) -> MismatchFigures:
    """The figures of ρ of each answer; minus infinity where a token is outside the stated distribution."""
    kept = [each[np.isfinite(each)] for each in log_ratios]
    count = sum(map(len, log_ratios))
    return MismatchFigures(
        mean=interval([_mean(np.abs(each)) for each in kept]),
        signed=interval([_mean(each) for each in kept]),
        p99=_p99(kept),
        answer=interval([abs(float(each.sum())) for each in kept]),
        weight=interval([_mean(np.exp(np.clip(each, -20, 20))) for each in kept]),
        outside=1 - sum(map(len, kept)) / count,
    )


def distances(log_ratios: Sequence[Floats]) -> Floats:
    """[n] mean |ρ| of each answer, nats a token."""
    return np.array([_mean(np.abs(each[np.isfinite(each)])) for each in log_ratios])


def overall(log_ratios: Sequence[Floats]) -> Interval:
    """The mean of `distances`."""
    return interval(distances(log_ratios))


def reduction(before: Sequence[Floats], after: Sequence[Floats]) -> Interval:
    """By how much |ρ| is smaller after a change, nats a token: paired, answer by answer."""
    return interval(distances(before) - distances(after))


def judged(reduced: Sequence[Interval], whole: Sequence[Interval]) -> str:
    """`less` or `more` if a change moves the mismatch by over `FLOOR`, and by over `SHARE` of the `whole`, with its
    entire interval, in any of the ways in which it was measured; else `same`."""
    for moved, of in zip(reduced, whole, strict=True):
        least = max(FLOOR, SHARE * of.value)
        if moved.low > least:
            return "less"
        if moved.high < -least:
            return "more"
    return "same"


def _mean(values: Floats) -> float:
    if len(values):
        return float(values.astype(np.float64).mean())
    return 0.0


def interval(values: Sequence[float] | Floats) -> Interval:
    """The mean of a value of each answer, with its interval over the answers."""
    return bootstrap_mean(list(values), seed=SEED, span=None)


def _p99(values: Sequence[Floats]) -> Interval:
    """The percentile, between the 2.5th and the 97.5th percentile of its resampled values."""
    sizes = [np.abs(each) for each in values]
    resampled = []
    for indices in resampled_indices(SEED, 0, REPLICATES, len(sizes)):
        resampled.append(np.quantile(np.concatenate([sizes[i] for i in indices]), 0.99))
    low, high = np.quantile(resampled, [0.025, 0.975])
    value = float(np.quantile(np.concatenate(sizes), 0.99))
    return Interval(
        value=value, low=min(float(low), value), high=max(float(high), value), method="bootstrap", questions=len(sizes)
    )
