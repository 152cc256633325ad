"""Healthy, watch or broken: the ideal ranges of verl's pull request 3694 for the metrics of its importance sampling.

One table for the docs, the report and the viewer. What the pull request leaves open ("close to 1") is bounded here, and
marked as ours. The health check of a run, `health`, has its own, mostly stricter, bounds; metrics that only it judges
have a verdict by these.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from proxima.core.correction.guard import MismatchGuard
from proxima.core.correction.health import HealthLevel, health, rules

Verdict = Literal["healthy", "watch", "broken"]
Range = tuple[float, float]

INFINITY = math.inf
ANY: Range = (-INFINITY, INFINITY)
OF_LEVEL: dict[HealthLevel, Verdict] = {"ok": "healthy", "watch": "watch", "act": "broken"}


@dataclass(frozen=True)
class IdealRange:
    """The verdict on one number of a step.

    Args:
        names: the metrics that it judges.
        healthy: strictly inside it the number is healthy.
        broken: strictly outside it the number is broken; between the two, watch.
        peer: the pull request's own words, ideal value and warning.
        ours: the bound of `healthy` is ours, because the pull request gives none.
    """

    names: tuple[str, ...]
    healthy: Range
    broken: Range = ANY
    peer: str = ""
    ours: bool = False

    def verdict(self, value: float) -> Verdict:
        """The verdict on a number that isn't NaN."""
        if not self.broken[0] <= value <= self.broken[1]:
            return "broken"
        return "healthy" if self.healthy[0] < value < self.healthy[1] else "watch"

    def words(self) -> dict[Verdict, str]:
        """Each verdict's range, for a table."""
        broken = [f"{sign} {bound:g}" for sign, bound in zip("<>", self.broken, strict=True) if math.isfinite(bound)]
        if broken and self.broken[0] == -self.broken[1]:
            broken = [f"|x| > {self.broken[1]:g}"]
        edge = _between(*self.broken, closed=True) if broken else "else"
        return {"healthy": _between(*self.healthy), "watch": edge, "broken": " or ".join(broken) or "–"}


def _between(low: float, high: float, *, closed: bool = False) -> str:
    less, more = ("≤", "≥") if closed else ("<", ">")
    if low == -high:
        return f"|x| {less} {high:g}"
    if math.isinf(low) or math.isinf(high):
        return f"{less} {high:g}" if math.isinf(low) else f"{more} {low:g}"
    return f"{low:g} to {high:g}"


def _in_both(*names: str) -> tuple[str, ...]:
    """The names of engine against trainer, and of what a correction applied."""
    return tuple(f"{prefix}/{name}" for name in names for prefix in ("mismatch", "correction"))


SHARES = ("ratio_fraction_high", "ratio_fraction_low")
IDEAL_RANGES = (
    IdealRange(_in_both("rollout_is_mean"), (0.9, 1.1), (0.5, 2.0), "close to 1; warning < 0.5 or > 2", ours=True),
    IdealRange(_in_both("rollout_is_std"), (-INFINITY, 0.5), (-INFINITY, 1.0), "< 0.5; warning > 1"),
    IdealRange(_in_both("rollout_is_eff_sample_size"), (0.5, INFINITY), (0.3, INFINITY), "> 0.5; warning < 0.3"),
    IdealRange(_in_both("rollout_is_seq_max_deviation"), (-INFINITY, 1.0), peer="< 1"),
    IdealRange(
        _in_both("rollout_is_catastrophic_token_fraction"),
        (-INFINITY, 0.01),
        (-INFINITY, 0.01),
        "warning > 0.01",
        ours=True,
    ),
    IdealRange(("correction/rollout_is_veto_fraction",), (-INFINITY, 0.05), (-INFINITY, 0.1), "< 0.05; warning > 0.1"),
    IdealRange(tuple(f"correction/rollout_is_{name}" for name in SHARES), (-INFINITY, 0.1), peer="< 0.1"),
    IdealRange(("correction/rollout_is_clipped_fraction",), (-INFINITY, 0.1), (-INFINITY, 0.3), "< 0.1; warning > 0.3"),
    IdealRange(_in_both("ppl_ratio"), (0.9, 1.1), peer="close to 1", ours=True),
    IdealRange(_in_both("log_ppl_diff"), (-0.1, 0.1), peer="close to 0", ours=True),
    IdealRange(_in_both("kl"), (-0.01, 0.01), (-0.1, 0.1), "close to 0; warning > 0.1, of |x| in its code", ours=True),
)
RANGE_OF = {name: ideal for ideal in IDEAL_RANGES for name in ideal.names}


def verdicts(values: Mapping[str, object], guard: MismatchGuard | None = None) -> dict[str, Verdict]:
    """The verdict on each metric of a step that has one.

    Args:
        values: metric → value, as in metrics.jsonl. What is absent, NaN or not a number has no verdict.
        guard: the run's, for the metrics that only the health check judges; its defaults if omitted.
    """
    numbers = {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value
    }
    checked = {verdict.metric: OF_LEVEL[verdict.level] for verdict in health(numbers, guard)}
    return checked | {name: RANGE_OF[name].verdict(value) for name, value in numbers.items() if name in RANGE_OF}


def healthy_range(name: str, guard: MismatchGuard | None = None) -> str:
    """The healthy range of a metric that has a verdict, in words."""
    if name in RANGE_OF:
        return RANGE_OF[name].words()["healthy"]
    (rule,) = (rule for rule in rules(guard or MismatchGuard()) if rule.metric == name)
    return f"{'≥' if rule.falling else '≤'} {rule.ok:g}"
