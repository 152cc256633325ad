"""A trust region that holds itself: its bounds follow what they are meant to hold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from proxima.data import require

# Metrics of a step: what is held, what a correction rejects, and s.
MASKED = "masked_fraction"
DRIFT = "hold/drift"
REJECTED = "correction/rejected_fraction"
COUNTED = "correction/rejected_counted_fraction"  # where a correction drops: of the tokens that stay in the loss
FACTOR = "hold/factor"


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Scale the bounds of the trust region by a factor that follows a target.

        s <- clamp(s exp(rate e), 1 / most, most)        masked: e = clamp(log(measured / target), -1, 1)
                                                         drift:  e = clamp(log(target / measured), -1, 1)

    s multiplies every bound of the surrogate (`Surrogate.bounds`: delta and delta_b of `cppo`); it is 1 in the first
    step. Where too many tokens are masked, the bounds are too narrow for what the updates move; where the policy drifts
    too far, they are too wide. A step that measures nothing moves nothing.

    Args:
        masked: the share of loss tokens that the trust region drops, in (0, 1), besides those that a correction
            rejects; null: not held.
        drift: the sum of |pi - mu| over the tokens of a completion, mean over completions, > 0; null: not held. One of
            the two is set.
        rate: the largest change of log s in a step, > 0. .1 is slow: a factor of e takes ten steps.
        most: the largest s, and the inverse of the smallest, >= 1.
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: 0 measured is an error of -1 (masked) or 1 (drift). A share that no bound can reach, such as that of a
        run whose updates move nothing, drives s to its end.
    Source: ours. A controller of a coefficient instead of the bound: Ziegler et al., arXiv 1909.08593, for the KL.
    """

    masked: float | None = None
    drift: float | None = None
    rate: float = 0.1
    most: float = 8.0

    def __post_init__(self) -> None:
        one = (self.masked is None) != (self.drift is None)
        require(one, "masked", self.masked, "either masked or drift must be set", remedy="such as masked=0.02")
        require(self.masked is None or 0 < self.masked < 1, "masked", self.masked, "must be in (0, 1), or none")
        valid = self.drift is None or 0 < self.drift < math.inf
        require(valid, "drift", self.drift, "must be > 0 and finite, or none")
        require(0 < self.rate < math.inf, "rate", self.rate, "must be > 0 and finite")
        require(1 <= self.most < math.inf, "most", self.most, "must be >= 1 and finite")

    @property
    def metric(self) -> str:
        """The metric of a step that is held."""
        return DRIFT if self.masked is None else MASKED

    def error(self, measured: float) -> float:
        """e, in [-1, 1]: above 0, the bounds are to be wider."""
        if self.masked is not None:
            ratio = measured / self.masked
            sign = 1.0
        else:
            assert self.drift is not None
            ratio = measured / self.drift
            sign = -1.0
        distance = math.log(ratio) if ratio > 0 else -math.inf
        return sign * min(max(distance, -1.0), 1.0)

    def next(self, factor: float, metrics: Mapping[str, float]) -> float:
        """s of the next step, given that of a step and its metrics."""
        measured = metrics.get(self.metric)
        if measured is None or not math.isfinite(measured):
            return factor
        if self.metric == MASKED:
            measured -= metrics.get(COUNTED, metrics.get(REJECTED, 0.0))
        moved = factor * math.exp(self.rate * self.error(measured))
        return min(max(moved, 1 / self.most), self.most)
