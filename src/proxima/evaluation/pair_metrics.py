"""Metrics of how well scores, or a policy's implicit rewards, identify the better of two completions, or good
completions among bad ones: accuracy, calibration, and trivial baselines.

Pairs of one question are not independent, so intervals of pairs are over the questions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from proxima.data import require
from proxima.evaluation.intervals import Interval, Z, ratio_of_sums, resampled_indices, wilson_interval

BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # edges of the confidence
REPLICATES = 2_000  # of the bootstrap of the calibration error


@dataclass(frozen=True, kw_only=True)
class ScoredPair:
    """A pair with the scores of both sides.

    Args:
        question: the same number for pairs with the same prompt.
        chosen, rejected: the scores, reward units. chosen_length, rejected_length: tokens of the completions.
    """

    question: int
    chosen: float
    rejected: float
    chosen_length: int
    rejected_length: int

    @property
    def lead(self) -> float:
        return self.chosen - self.rejected


def pair_metrics(pairs: Sequence[ScoredPair], *, seed: int = 0) -> dict[str, float]:
    """The metrics of held-out pairs, intervals (95 %) as NAME/low and NAME/high.

        accuracy             share of pairs whose chosen side scores strictly higher; a tie is wrong
        loss                 mean of -log sigmoid(lead)
        margin               mean of the lead
        length_only/…        accuracy of a rule that reads no text: it picks the longer side, or always the shorter one,
                             whichever is right more often on these pairs, which favours the rule; equal lengths count
                             half
        random/…             accuracy of a coin: 0.5, with the Wilson interval for as many questions
        over_length/…        accuracy minus that of the length rule, on the same pairs
        calibration/error    expected calibration error of the confidence p = sigmoid(|lead|) that the higher score is
                             the better side, Σ_b n_b / n |share right - mean p| over the bins of `BINS`; its interval
                             is a bootstrap over the questions; few pairs make error and interval too large
        calibration/BIN/…    pairs, mean confidence and share right of a bin named in %; bins without pairs are left out
        score/mean, score/std   of all completions
        correct, answers, questions   numbers of pairs ranked correctly, of pairs, and of questions

    Args:
        pairs: at least one; otherwise ValueError. seed: of the bootstrap.
    Source: Guo et al., arXiv 1706.04599, for the calibration error.
    """
    require(len(pairs) >= 1, "pairs", len(pairs), "must be at least 1")
    lead = np.array([pair.lead for pair in pairs])
    right = (lead > 0).astype(np.float64)
    longer = np.sign(np.array([pair.chosen_length - pair.rejected_length for pair in pairs])) / 2 + 0.5
    length = longer if longer.mean() >= 0.5 else 1 - longer
    question = np.unique([pair.question for pair in pairs], return_inverse=True)[1]
    count = int(question.max()) + 1
    scores = np.array([(pair.chosen, pair.rejected) for pair in pairs]).flatten()
    out = {
        **over_questions(right, question).figures("accuracy"),
        "correct": int(right.sum()),
        "answers": len(pairs),
        "questions": count,
        "loss": float(np.logaddexp(0, -lead).mean()),
        "margin": float(lead.mean()),
        **over_questions(length, question).figures("length_only/accuracy"),
        **wilson_interval(count / 2, count).figures("random/accuracy"),
        **_sums(right - length, question).figures("over_length/accuracy"),
        "score/mean": float(scores.mean()),
        "score/std": float(scores.std()),
    }
    return out | calibration(lead, right, question, seed)


def calibration(lead: np.ndarray, right: np.ndarray, question: np.ndarray, seed: int) -> dict[str, float]:
    """The calibration part of `pair_metrics`."""
    confidence = 1 / (1 + np.exp(-np.minimum(np.abs(lead), 700)))
    place = np.clip(np.searchsorted(BINS, confidence, side="right") - 1, 0, len(BINS) - 2)
    count = int(question.max()) + 1
    bins = len(BINS) - 1
    gaps = np.zeros((count, bins))  # of each question: Σ (right - confidence) in each bin
    np.add.at(gaps, (question, place), right - confidence)
    sizes = np.bincount(question, minlength=count).astype(np.float64)
    resampled: list[float] = []
    for replicate in range(REPLICATES):
        rows = resampled_indices(seed, replicate, replicate + 1, count)[0]
        error = np.abs(gaps[rows].sum(axis=0)).sum() / sizes[rows].sum()
        resampled.append(float(error))
    low, high = np.quantile(resampled, (0.025, 0.975))
    value = float(np.abs(gaps.sum(axis=0)).sum() / len(lead))
    out = {
        "calibration/error": value,
        "calibration/error/low": min(value, float(low)),
        "calibration/error/high": max(value, float(high)),
    }
    for b in range(bins):
        inside = place == b
        if inside.any():
            name = f"calibration/{round(100 * BINS[b])}-{round(100 * BINS[b + 1])}"
            out[f"{name}/pairs"] = float(inside.sum())
            out[f"{name}/confidence"] = float(confidence[inside].mean())
            out[f"{name}/right"] = float(right[inside].mean())
    return out


def over_questions(right: np.ndarray, question: np.ndarray) -> Interval:
    """A share of the pairs, with Wilson's interval if each question has one pair or all pairs have the same result;
    otherwise with the interval of `ratio_of_sums` over the questions."""
    count = int(question.max()) + 1
    if count < len(right) and np.ptp(right) > 0:
        return _sums(right, question)
    return wilson_interval(float(right.mean()) * count, count)


def _sums(values: np.ndarray, question: np.ndarray) -> Interval:
    interval = ratio_of_sums(np.bincount(question, weights=values).tolist(), np.bincount(question).tolist())
    low = max(float(values.min()), interval.low)
    high = min(float(values.max()), interval.high)
    return replace(interval, low=low, high=high)


SIDES = ("chosen", "rejected")


@dataclass(frozen=True, kw_only=True)
class ComparedItem:
    """Figures of a pair, by side (`chosen`, `rejected`); a labeled completion has only its own side."""

    question: bytes  # the tokens of the prompt, which pairs of one question share
    reward: dict[str, float]  # implicit, reward units
    log_prob: dict[str, float]  # nats, summed
    loss: float | None = None  # of the pair alone; None if losses depend on other pairs


def preference_metrics(measured: Sequence[ComparedItem]) -> dict[str, float]:
    """The metrics of held-out pairs, or of held-out labeled completions; at least one.

    accuracy             of pairs: the share whose chosen side has the larger reward; of labeled completions: the
                         share of combinations of a good and a bad one in which the good one has the larger reward (the
                         area under the ROC curve); a tie counts half
    log_prob_accuracy    of pairs: the same with the log-probs
    rewards/…, logps/…   means of the sides, and the mean margin of pairs
    loss                 mean of the pairs' losses
    """
    out: dict[str, float] = {}
    if all(len(item.reward) == 2 for item in measured):
        out |= _share(measured, "reward").figures("accuracy")
        out |= _share(measured, "log_prob").figures("log_prob_accuracy")
        margins = [item.reward["chosen"] - item.reward["rejected"] for item in measured]
        out["rewards/margins"] = float(np.mean(margins))
        out["answers"] = len(measured)
        out["correct"] = sum(margin > 0 for margin in margins)
        out["questions"] = len({item.question for item in measured})
    else:
        good = [item.reward["chosen"] for item in measured if "chosen" in item.reward]
        bad = [item.reward["rejected"] for item in measured if "rejected" in item.reward]
        if good and bad:
            out |= _in_order(good, bad).figures("accuracy")
    for side in SIDES:
        rewards = [item.reward[side] for item in measured if side in item.reward]
        if rewards:
            out[f"rewards/{side}"] = float(np.mean(rewards))
        log_probs = [item.log_prob[side] for item in measured if side in item.log_prob]
        if log_probs:
            out[f"logps/{side}"] = float(np.mean(log_probs))
    losses = [item.loss for item in measured if item.loss is not None]
    if losses:
        out["loss"] = float(np.mean(losses))
    return out


def _share(measured: Sequence[ComparedItem], name: str) -> Interval:
    """The share of pairs whose chosen side has the larger figure (a tie counts half), with its interval over the
    questions."""
    figures = [getattr(item, name) for item in measured]
    leads = [of_sides["chosen"] - of_sides["rejected"] for of_sides in figures]
    numbers: dict[bytes, int] = {}
    question = [numbers.setdefault(item.question, len(numbers)) for item in measured]
    return over_questions((np.sign(leads) + 1) / 2, np.array(question))


def _in_order(good: Sequence[float], bad: Sequence[float]) -> Interval:
    """The share of combinations (good, bad) in which the good one is larger, a tie counting half: the area under the
    ROC curve, with the interval of DeLong et al., Biometrics 44 (1988)."""
    wins = (np.sign(np.subtract.outer(good, bad)) + 1) / 2
    value = float(wins.mean())
    spread = 0.0
    for shares in (wins.mean(axis=1), wins.mean(axis=0)):
        if len(shares) > 1:
            spread += float(shares.var(ddof=1)) / len(shares)
    half = Z * spread**0.5
    low = max(0.0, value - half)
    high = min(1.0, value + half)
    return Interval(value=value, low=low, high=high, method="delong", questions=len(good) + len(bad))
