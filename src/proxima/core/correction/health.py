"""What the mismatch statistics of a step mean, in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Verdict:
    """`level` ok, watch or act; `metric` and its `value`; `sentence` says what it means and what to change."""

    level: Literal["ok", "watch", "act"]
    metric: str
    value: float
    sentence: str


@dataclass(frozen=True)
class _Rule:
    metric: str
    ok: float  # the last healthy value
    act: float  # the first that needs action
    falling: bool  # True: small values are bad
    means: str
    remedy: str


RULES: tuple[_Rule, ...] = (
    _Rule(
        "mismatch/rollout_is_eff_sample_size",
        0.8,
        0.3,
        True,
        "of the batch is left once tokens are weighted",
        "lower `correction.upper`, publish weights more often, or take the engine's log-probs at the trainer's "
        "precision",
    ),
    _Rule(
        "mismatch/rollout_is_veto_fraction",
        0.05,
        0.2,
        False,
        "of the sequences hold a token that the proximal policy all but excludes",
        "check that engine and trainer have the same weights, tokenizer and temperature; then raise `correction.veto`",
    ),
    _Rule(
        "mismatch/rollout_is_catastrophic_token_fraction",
        0.01,
        0.05,
        False,
        "of the tokens are all but excluded by the proximal policy",
        "check weight publication (tied embeddings!) and that both sides see the same prompt tokens",
    ),
    _Rule(
        "mismatch/rejected_fraction",
        0.2,
        0.5,
        False,
        "of the tokens are rejected",
        "widen the bounds of the correction, or reduce the lag of the rollouts",
    ),
)
MEAN = "mismatch/rollout_is_mean"


def health(values: Mapping[str, float]) -> list[Verdict]:
    """Judge a step's merged metrics.

    Args:
        values: metric → value, as in metrics.jsonl; metrics that are absent are not judged.
    Returns: one verdict a rule that could be judged, in the order: effective sample size (> 80 % ok), veto (< 5 %),
        catastrophic tokens (< 1 %), rejected tokens (< 20 %), mean weight (within 10 % of 1).
    """
    verdicts = []
    for rule in RULES:
        if rule.metric in values:
            value = values[rule.metric]
            bad = [value < x if rule.falling else value > x for x in (rule.act, rule.ok)]
            verdicts.append(
                _verdict(
                    "act" if bad[0] else "watch" if bad[1] else "ok",
                    rule.metric,
                    value,
                    f"{value:.1%} {rule.means}",
                    rule.remedy,
                )
            )
    if MEAN in values:
        value = values[MEAN]
        off = abs(value - 1)
        level: Literal["ok", "watch", "act"] = "act" if off > 0.5 else "watch" if off > 0.1 else "ok"
        remedy = (
            "a mean far from 1 is no sampling noise: compare log-probs of engine and trainer on one prompt "
            "(`proxima doctor`)"
        )
        verdicts.append(_verdict(level, MEAN, value, f"the mean weight is {value:.3f}, 1 is expected", remedy))
    return verdicts


def _verdict(level: Literal["ok", "watch", "act"], metric: str, value: float, meaning: str, remedy: str) -> Verdict:
    return Verdict(level, metric, value, f"{meaning}." if level == "ok" else f"{meaning}: {remedy}.")
