"""The health check of a step: what its mismatch and correction statistics mean, and what to change."""

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
CORRECT = ", or correct for it: proxima's documentation of the mismatch says how"
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
                   "widen the bounds of the correction, or lower runtime.max_lag"),
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
    elif remedy == PRECISION and corrected:
        remedy = f"{SAME_PRECISION}{CORRECTED}"
    return HealthVerdict(level, metric, value, f"{meaning}." if level == "ok" else f"{meaning}: {remedy}.")
