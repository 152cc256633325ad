"""Metrics of how well a policy's implicit rewards separate the better of two completions, or good from bad ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proxima.evaluation.intervals import Interval, Z
from proxima.evaluation.pair_metrics import over_questions

SIDES = ("chosen", "rejected")


@dataclass(frozen=True, kw_only=True)
class ComparedItem:
    """Figures of a pair, by side; for a completion with a label, only those of its own side."""

    question: bytes  # the tokens of the prompt, which pairs of one question share
    reward: dict[str, float]  # implicit, reward units
    log_prob: dict[str, float]  # nats, summed
    loss: float | None = None  # of the pair alone; None if losses depend on other pairs


def preference_metrics(measured: Sequence[ComparedItem]) -> dict[str, float]:
    """The metrics of held-out pairs, or of held-out completions with a label; at least one.

    accuracy             of pairs: the share whose chosen side has the larger reward; of labeled completions: the
                         share of couples of a good and a bad one in which the good one has the larger reward
    log_prob_accuracy    of pairs, by the log-probs
    rewards/…, logps/…   means of the sides, and the mean margin of pairs
    loss                 mean of the pairs' own
    """
    out: dict[str, float] = {}
    if all(len(item.reward) == 2 for item in measured):
        out |= _share(measured, "reward").figures("accuracy")
        out |= _share(measured, "log_prob").figures("log_prob_accuracy")
        margins = [item.reward["chosen"] - item.reward["rejected"] for item in measured]
        out |= {"rewards/margins": float(np.mean(margins)), "answers": len(measured)}
        out["correct"] = sum(margin > 0 for margin in margins)
        out["questions"] = len({item.question for item in measured})
    else:
        good, bad = ([item.reward[side] for item in measured if side in item.reward] for side in SIDES)
        if good and bad:
            out |= _in_order(good, bad).figures("accuracy")
    for side in SIDES:
        for name in ("reward", "log_prob"):
            values = [getattr(item, name)[side] for item in measured if side in getattr(item, name)]
            if values:
                out[f"{'rewards' if name == 'reward' else 'logps'}/{side}"] = float(np.mean(values))
    losses = [item.loss for item in measured if item.loss is not None]
    return out | ({"loss": float(np.mean(losses))} if losses else {})


def _share(measured: Sequence[ComparedItem], name: str) -> Interval:
    """The share of pairs whose chosen side has the larger figure, a tie counting half, with its interval over the
    questions: pairs of one question are not independent."""
    leads = [getattr(item, name)["chosen"] - getattr(item, name)["rejected"] for item in measured]
    names = {question: number for number, question in enumerate(dict.fromkeys(item.question for item in measured))}
    question = np.array([names[item.question] for item in measured])
    return over_questions((np.sign(leads) + 1) / 2, question)


def _in_order(good: Sequence[float], bad: Sequence[float]) -> Interval:
    """The share of (good, bad) couples in which the good one is larger, a tie counting half: the area under the ROC
    curve, with the interval of DeLong et al., Biometrics 44 (1988)."""
    wins = (np.sign(np.subtract.outer(good, bad)) + 1) / 2
    value, spread = float(wins.mean()), 0.0
    for shares in (wins.mean(axis=1), wins.mean(axis=0)):
        spread += float(shares.var(ddof=1)) / len(shares) if len(shares) > 1 else 0.0
    half = Z * spread**0.5
    low, high = max(0.0, value - half), min(1.0, value + half)
    return Interval(value=value, low=low, high=high, method="delong", questions=len(good) + len(bad))
