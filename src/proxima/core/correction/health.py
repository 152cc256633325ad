"""The meaning of a step's mismatch and correction statistics.

`health` checks a step and says what to change. `verdicts` calls each metric healthy, watch or broken, for the docs, the
report and the viewer, by `IDEAL_RANGES`: the ideal ranges of verl's pull request 3694 for the metrics of its importance
sampling. What the pull request leaves open ("close to 1") is bounded here, and marked as ours. The rules of `health`
have their own, mostly stricter, bounds; metrics that only they judge have a verdict by these.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from proxima.core.correction.guard import MismatchGuard

HealthLevel = Literal["ok", "watch", "act"]


@dataclass(frozen=True)
class HealthVerdict:
    """`level` ok, watch or act; `metric` and its `value`; `sentence` says what it means and what to change."""

    level: HealthLevel
    metric: str
    value: float
    sentence: str


@dataclass(frozen=True)
class HealthRule:
    """`ok` is the last healthy value, `act` the last that needs no action; with `falling`, small values are bad; with
    `centre`, both are distances from it."""

    metric: str
    ok: float
    act: float
    meaning: str
    remedy: str
    falling: bool = False
    centre: float | None = None

    def level(self, value: float) -> HealthLevel:
        value = value if self.centre is None else abs(value - self.centre)
        bad = [value < bound if self.falling else value > bound for bound in (self.act, self.ok)]
        return "act" if bad[0] else "watch" if bad[1] else "ok"


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


def rules(guard: MismatchGuard) -> tuple[HealthRule, ...]:
    """The rules, in the order in which they are reported; the guard's thresholds are the bounds of its two metrics."""
    kl, catastrophic = guard.max_k3_kl, guard.max_catastrophic
    # metric, ok, act; what it means; what to change
    # fmt: off
    return (
        HealthRule("mismatch/k3_kl", min(0.01, kl), kl,
                   "{value:.3g} nats a token between rollout engine and trainer (k3)", PRECISION),
        HealthRule("mismatch/rollout_is_catastrophic_seq_fraction", min(0.01, catastrophic), catastrophic,
                   "{value:.1%} of the sequences hold a token that the trainer all but excludes (ratio below 1e-4)",
                   SAME_WEIGHTS),
        HealthRule("mismatch/log_prob_absdiff_mean", 0.05, 0.1,
                   "log-probs of engine and trainer differ by {value:.3f} nats a token on average", PRECISION),
        HealthRule("mismatch/rollout_is_eff_sample_size", 0.8, 0.3,
                   "{value:.1%} of the batch would be left if its tokens were weighted by their ratio",
                   PRECISION, falling=True),
        HealthRule("correction/rollout_is_eff_sample_size", 0.8, 0.3,
                   "{value:.1%} of the batch is left once the correction weights it",
                   "use `level: token`, lower `correction.upper`, or publish weights more often", falling=True),
        HealthRule("correction/rollout_is_veto_fraction", 0.05, 0.2,
                   "{value:.1%} of the sequences hold a token below the veto",
                   f"{SAME_WEIGHTS}; then lower `correction.veto`"),
        HealthRule("correction/rejected_fraction", 0.2, 0.5, "{value:.1%} of the tokens are rejected",
                   "widen the bounds of the correction"),
        HealthRule("mismatch/rejected_seq_fraction", 0.05, 0.2,
                   "{value:.1%} of the sequences were rejected by algorithm.mismatch.on_mismatch", SAME_WEIGHTS),
        HealthRule("mismatch/rollout_is_mean", 0.1, 0.5, "the mean token weight is {value:.3f} where 1 is expected",
                   SAME_WEIGHTS, centre=1.0),
    )
    # fmt: on


# Rejections that `top_entropy` makes on purpose are no sign of a mismatch.
ON_PURPOSE = {"correction/rejected_fraction": "correction/top_entropy_masked_fraction"}


def health(
    values: Mapping[str, object], guard: MismatchGuard | None = None, known_mismatch: str = ""
) -> list[HealthVerdict]:
    """Judge a step's merged metrics.

    Args:
        values: metric → value, as in metrics.jsonl; metrics that are absent are not judged.
        guard: the thresholds of `mismatch/k3_kl` and of catastrophic sequences.
        known_mismatch: the settings that make the engine differ on purpose.
    Returns: one verdict for each rule that could be judged, in the order of `rules`. docs/mismatch.md has the table.
    """
    verdicts = []
    for rule in rules(guard or MismatchGuard()):
        value = values.get(rule.metric)
        if isinstance(value, int | float):
            intended = values.get(ON_PURPOSE.get(rule.metric, ""))
            value = max(0.0, value - intended) if isinstance(intended, int | float) else value
            verdicts.append(_verdict(rule, value, values, known_mismatch))
    return verdicts


def _verdict(rule: HealthRule, value: float, values: Mapping[str, object], known: str) -> HealthVerdict:
    level, metric, remedy, meaning = rule.level(value), rule.metric, rule.remedy, rule.meaning.format(value=value)
    age, corrected = values.get("age/max"), any(name.startswith("correction/") for name in values)
    if metric.startswith("mismatch/") and known:
        remedy = f"expected with {known}"
    elif metric.startswith("mismatch/") and values.get("replayed"):
        remedy = REPLAYED
    elif metric.startswith("mismatch/") and isinstance(age, int | float) and age > 0:
        versions = f"{age:.0f} policy version{'s' * (round(age) != 1)}"
        aged = f"some groups are {versions} old, so lower runtime.max_lag"
        remedy = f"{aged}{CORRECTED}" if corrected else f"{aged}{CORRECT}"
    elif metric == "correction/rejected_fraction" and isinstance(age, int | float) and age > 0:
        remedy = f"{remedy}, or lower runtime.max_lag"
    elif remedy == PRECISION and corrected:
        remedy = f"{SAME_PRECISION}{CORRECTED}"
    return HealthVerdict(level, metric, value, f"{meaning}." if level == "ok" else f"{meaning}: {remedy}.")


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
