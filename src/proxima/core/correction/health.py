"""The meaning of a step's mismatch and correction statistics.

`RANGES` is the one table: which values of a metric are healthy, watch or broken, and by whom. By it `verdicts` marks
numbers in the report and the viewer, `health` warns of those that are broken and says what to change, and the docs have
a table. verl's pull request 3694 gives two ranges for some metrics, one in its own text and one on its page; the
stricter one is healthy here, and both stand in the table. What it leaves open ("close to 1") is bounded here.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from proxima.core.correction.guard import LIMITS, MismatchGuard

HealthLevel = Literal["ok", "watch", "act"]
Verdict = Literal["healthy", "watch", "broken"]
Range = tuple[float, float]

INFINITY = math.inf
ANY: Range = (-INFINITY, INFINITY)
LEVEL_OF: dict[Verdict, HealthLevel] = {"healthy": "ok", "watch": "watch", "broken": "act"}


@dataclass(frozen=True)
class MetricRange:
    """Which values of a metric are healthy, and which broken.

    Args:
        names: the metrics that it judges.
        healthy: inside it the number is healthy; on its ends too if `closed`.
        broken: strictly outside it the number is broken; between the two, watch.
        text, page: what the pull request's own text, and its page, call ideal, with the page's warning.
        ours: the bound of `healthy` is ours.
        closed: the ends of `healthy` are healthy.
        typical: the usual values of a run without a mismatch.
    """

    names: tuple[str, ...]
    healthy: Range
    broken: Range = ANY
    text: str = ""
    page: str = ""
    ours: bool = False
    closed: bool = False
    typical: str = ""

    def verdict(self, value: float) -> Verdict:
        """The verdict on a number that isn't NaN."""
        low, high = self.healthy
        if not self.broken[0] <= value <= self.broken[1]:
            return "broken"
        if low < value < high or (self.closed and value in (low, high)):
            return "healthy"
        return "watch"

    def words(self) -> dict[Verdict, str]:
        """Each verdict's range, for a table."""
        broken = [f"{sign} {bound:g}" for sign, bound in zip("<>", self.broken, strict=True) if math.isfinite(bound)]
        if broken and self.broken[0] == -self.broken[1]:
            broken = [f"|x| > {self.broken[1]:g}"]
        healthy = _between(*self.healthy, closed=self.closed)
        if not broken:
            return {"healthy": healthy, "watch": "else", "broken": "–"}
        return {"healthy": healthy, "watch": _between(*self.broken, closed=True), "broken": " or ".join(broken)}


def _between(low: float, high: float, *, closed: bool = False) -> str:
    less = "≤" if closed else "<"
    more = "≥" if closed else ">"
    if low == -high:
        return f"|x| {less} {high:g}"
    if math.isinf(low):
        return f"{less} {high:g}"
    if math.isinf(high):
        return f"{more} {low:g}"
    return f"{low:g} to {high:g}"


def _in_both(*names: str) -> tuple[str, ...]:
    """The names of engine against trainer, and of what a correction applied."""
    return tuple(f"{prefix}/{name}" for name in names for prefix in ("mismatch", "correction"))


def _below(names: tuple[str, ...], healthy: float, broken: float = INFINITY, **facts: Any) -> MetricRange:
    """The range of metrics of which small values are healthy."""
    return MetricRange(names, (-INFINITY, healthy), (-INFINITY, broken), **facts)


SHARES = ("correction/rollout_is_ratio_fraction_high", "correction/rollout_is_ratio_fraction_low")
RANGES = (
    _below(
        ("mismatch/k3_kl",),
        0.01,
        0.05,
        ours=True,
        closed=True,
        typical="1e-5 to 1e-3 dense, 1e-3 to 1e-1 mixture of experts",
    ),
    MetricRange(
        _in_both("kl"), (-0.01, 0.01), (-0.1, 0.1), page="close to 0; warning > 0.1, of |x| in its code", ours=True
    ),
    _below(("mismatch/rollout_is_catastrophic_seq_fraction",), 0.01, 0.05, ours=True, closed=True, typical="0"),
    _below(
        ("mismatch/log_prob_absdiff_mean",),
        0.05,
        0.1,
        ours=True,
        closed=True,
        typical="0.01 to 0.03 in bf16, 1e-5 in float32",
    ),
    MetricRange(
        _in_both("rollout_is_mean"),
        (0.9, 1.1),
        (0.5, 1.5),
        "~1.0",
        "close to 1; warning < 0.5 or > 2",
        ours=True,
        typical="1.000",
    ),
    _below(_in_both("rollout_is_std"), 0.5, 1.0, text="low", page="< 0.5; warning > 1"),
    MetricRange(
        _in_both("rollout_is_eff_sample_size"),
        (0.8, INFINITY),
        (0.3, INFINITY),
        "> 80 %",
        "> 0.5; warning < 0.3",
        typical="99 %",
    ),
    MetricRange(_in_both("rollout_is_p25"), (0.8, 1.1), text="~0.8 to 1.0", ours=True, typical="1.000"),
    MetricRange(
        _in_both("rollout_is_p50"), (0.9, 1.1), text="~1.0", page="close to the mean", ours=True, typical="1.000"
    ),
    MetricRange(_in_both("rollout_is_p75"), (0.9, 1.2), text="~1.0 to 1.2", ours=True, typical="1.000"),
    _below(_in_both("rollout_is_seq_max_deviation"), 1.0, page="< 1"),
    _below(
        _in_both("rollout_is_catastrophic_token_fraction"), 0.01, 0.01, text="< 1 %", page="warning > 0.01", typical="0"
    ),
    MetricRange(_in_both("ppl_ratio"), (0.9, 1.1), page="close to 1", ours=True),
    MetricRange(_in_both("log_ppl_diff"), (-0.1, 0.1), page="close to 0", ours=True),
    _below(("mismatch/rejected_seq_fraction",), 0.05, 0.2, ours=True, closed=True, typical="0"),
    _below(
        ("correction/rollout_is_veto_fraction",), 0.05, 0.1, text="< 5 %", page="< 0.05; warning > 0.1", typical="0"
    ),
    _below(SHARES, 0.1, page="< 0.1"),
    _below(("correction/rollout_is_clipped_fraction",), 0.1, 0.3, text="variable", page="< 0.1; warning > 0.3"),
    _below(("correction/rejected_fraction",), 0.2, 0.5, ours=True, closed=True, typical="depends on the bounds"),
)
RANGE_OF = {name: metric_range for metric_range in RANGES for name in metric_range.names}

# metric → its side of the bounds of the correction's weights, and the pull request's words
BOUNDED = {
    "correction/rollout_is_p95": ("upper", "< threshold"),
    "correction/rollout_is_p99": ("upper", "< threshold"),
    "correction/rollout_is_max": ("upper", "≤ threshold"),
    "correction/rollout_is_min": ("lower", "≥ lower threshold, where one is set"),
}


def range_of(name: str, guard: MismatchGuard | None = None, bounds: Range = ANY) -> MetricRange | None:
    """The range of a metric; None if it has none.

    Args:
        guard: the run's thresholds of its two metrics; its defaults if omitted.
        bounds: lower and upper bound of the correction's weights; infinite where it has none.
    """
    if name in BOUNDED:
        side, words = BOUNDED[name]
        low, high = bounds
        if side == "upper":
            healthy = (-INFINITY, high)
        else:
            healthy = (low, INFINITY)
        if healthy == ANY:
            return None
        return MetricRange((name,), healthy, text=words, closed=True)

    metric_range = RANGE_OF.get(name)
    if metric_range is None or name not in LIMITS:
        return metric_range
    limit: float = getattr(guard or MismatchGuard(), LIMITS[name])
    return replace(metric_range, healthy=(-INFINITY, min(metric_range.healthy[1], limit)), broken=(-INFINITY, limit))


def verdicts(
    values: Mapping[str, object], guard: MismatchGuard | None = None, bounds: Range = ANY
) -> dict[str, Verdict]:
    """The verdict on each metric of a step that has a range.

    Args:
        values: metric → value, as in metrics.jsonl. What is absent, NaN or not a number has no verdict.
        guard, bounds: as in `range_of`.
    """
    judged = {}
    for name, value in _numbers(values):
        metric_range = range_of(name, guard, bounds)
        if metric_range is not None:
            judged[name] = metric_range.verdict(_unintended(name, value, values))
    return judged


def _numbers(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
            yield name, value


# Rejections that `top_entropy` makes on purpose are no sign of a mismatch.
ON_PURPOSE = {"correction/rejected_fraction": "correction/top_entropy_masked_fraction"}


def _unintended(name: str, value: float, values: Mapping[str, object]) -> float:
    intended = values.get(ON_PURPOSE.get(name, ""))
    if isinstance(intended, int | float):
        return max(0.0, value - intended)
    return value


@dataclass(frozen=True)
class HealthVerdict:
    """`level` ok, watch or act; `metric` and its `value`; `sentence` says what it means and what to change."""

    level: HealthLevel
    metric: str
    value: float
    sentence: str


@dataclass(frozen=True)
class HealthCheck:
    """A metric of which the health check warns: what its `{value}` means, and what to change."""

    metric: str
    meaning: str
    remedy: str


SAME_WEIGHTS = "check that engine and trainer have the same weights, tokenizer, prompt tokens and temperature"
SAME_PRECISION = "set model.compute_dtype=float32 or serve in the dtype that is trained"
PRECISION = (
    f"{SAME_PRECISION}, or weight the tokens: algorithm.proximal=recompute algorithm.correction=decoupled_token_is"
)
CORRECT = ", or correct for it: docs/mismatch.md says how"
CORRECTED = "; algorithm.correction weights or rejects tokens already, see correction/"
REPLAYED = (
    "this run is a replay, and its policy has moved away from the one that wrote the rollouts: replay fewer steps, "
    "lower the learning rate, or weight the tokens by algorithm.proximal=recompute "
    "algorithm.correction=decoupled_token_is"
)


# in the order in which they are reported
# fmt: off
HEALTH_CHECKS = (
    HealthCheck("mismatch/k3_kl",
                "{value:.3g} nats a token between rollout engine and trainer (k3)", PRECISION),
    HealthCheck("mismatch/rollout_is_catastrophic_seq_fraction",
                "{value:.1%} of the sequences hold a token that the trainer all but excludes (ratio below 1e-4)",
                SAME_WEIGHTS),
    HealthCheck("mismatch/log_prob_absdiff_mean",
                "log-probs of engine and trainer differ by {value:.3f} nats a token on average", PRECISION),
    HealthCheck("mismatch/rollout_is_eff_sample_size",
                "{value:.1%} of the batch would be left if its tokens were weighted by their ratio", PRECISION),
    HealthCheck("correction/rollout_is_eff_sample_size",
                "{value:.1%} of the batch is left once the correction weights it",
                "use `level: token`, lower `correction.upper`, or publish weights more often"),
    HealthCheck("correction/rollout_is_veto_fraction",
                "{value:.1%} of the sequences hold a token below the veto",
                f"{SAME_WEIGHTS}; then lower `correction.veto`"),
    HealthCheck("correction/rejected_fraction", "{value:.1%} of the tokens are rejected",
                "widen the bounds of the correction"),
    HealthCheck("mismatch/rejected_seq_fraction",
                "{value:.1%} of the sequences were rejected by algorithm.mismatch.on_mismatch", SAME_WEIGHTS),
    HealthCheck("mismatch/rollout_is_mean", "the mean token weight is {value:.3f} where 1 is expected",
                SAME_WEIGHTS),
)
# fmt: on


def health(
    values: Mapping[str, object], guard: MismatchGuard | None = None, known_mismatch: str = ""
) -> list[HealthVerdict]:
    """Judge a step's merged metrics by `RANGES`.

    Args:
        values: metric → value, as in metrics.jsonl; metrics that are absent are not judged.
        guard: the thresholds of `mismatch/k3_kl` and of catastrophic sequences.
        known_mismatch: the settings that make the engine differ on purpose.
    Returns: a verdict for each of `HEALTH_CHECKS` that could be judged, in their order.
    """
    judged = verdicts(values, guard)
    found: list[HealthVerdict] = []
    for check in HEALTH_CHECKS:
        if check.metric in judged:
            level = LEVEL_OF[judged[check.metric]]
            found.append(_explained(check, level, values, known_mismatch))
    return found


def _explained(check: HealthCheck, level: HealthLevel, values: Mapping[str, object], known: str) -> HealthVerdict:
    metric = check.metric
    remedy = check.remedy
    number: Any = values[metric]
    value = _unintended(metric, number, values)
    meaning = check.meaning.format(value=value)
    if level == "ok":
        return HealthVerdict(level, metric, value, f"{meaning}.")

    reported = values.get("age/max")
    age = reported if isinstance(reported, int | float) else 0.0
    corrected = any(name.startswith("correction/") for name in values)
    of_mismatch = metric.startswith("mismatch/")
    if of_mismatch and known:
        remedy = f"expected with {known}"
    elif of_mismatch and values.get("replayed"):
        remedy = REPLAYED
    elif of_mismatch and age > 0:
        versions = "policy version" if round(age) == 1 else "policy versions"
        further = CORRECTED if corrected else CORRECT
        remedy = f"some groups are {age:.0f} {versions} old, so lower runtime.max_lag{further}"
    elif metric == "correction/rejected_fraction" and age > 0:
        remedy = f"{remedy}, or lower runtime.max_lag"
    elif remedy == PRECISION and corrected:
        remedy = f"{SAME_PRECISION}{CORRECTED}"
    return HealthVerdict(level, metric, value, f"{meaning}: {remedy}.")
