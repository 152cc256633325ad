"""Ends a run whose held-out metric no longer improves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proxima.data import require
from proxima.evaluation.headline import Headline, Record


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Ends the run after an evaluation if the last `patience` evaluations brought no improvement.

    Args:
        patience: evaluations without an improvement, >= 1.
        min_delta: an evaluation is an improvement if it exceeds the best one before it by more than this, >= 0.
        metric: a name as for `eval.metric`, or a key of the evaluations' records, as `loss` or `math/accuracy`; null:
            the headline. Lower is better for `loss`, higher for everything else.
    Edge cases: the evaluation before training counts; one without a value of the metric does not. The rule reads only
        the run's records, so a resumed run ends at the same evaluation as an uninterrupted one.
    """

    patience: int
    min_delta: float = 0.0
    metric: str | None = None

    def __post_init__(self) -> None:
        require(self.patience >= 1, "patience", self.patience, "must be >= 1")
        require(0 <= self.min_delta < math.inf, "min_delta", self.min_delta, "must be >= 0 and finite")

    def reached(self, evaluations: Sequence[Record]) -> str:
        """Return the reason why the run ends after these evaluations, given in order; empty if it does not end."""
        headline = Headline.of(evaluations, self.metric)
        best = -math.inf
        best_step = 0
        since = 0  # evaluations since the best
        for record in evaluations:
            score = headline.score(record)
            if score is None:
                continue
            if score > best + self.min_delta:
                best = score
                best_step = record["step"]
                since = 0
            else:
                since += 1
        if since < self.patience:
            return ""
        value = abs(best) if headline.lower_is_better else best
        improved = "has not improved"
        if self.min_delta:
            improved += f" by more than {self.min_delta:g}"
        noun = "evaluation" if since == 1 else "evaluations"
        what = f"{headline.title} {improved} in {since} {noun}"
        return f"plateau: {what}, its best is {value:.4g} at step {best_step}"

    def unknown(self, evaluation: Record) -> str:
        """Return the problem with the metric's name; empty if the record of an evaluation has the metric."""
        headline = Headline.of([evaluation], self.metric)
        if self.metric is None or headline.key in evaluation:
            return ""
        names = [key for key, value in evaluation.items() if isinstance(value, float) and not key.startswith("time")]
        return f"eval.stop_after.metric={self.metric}: the evaluation has no such metric; it has {', '.join(names)}"
