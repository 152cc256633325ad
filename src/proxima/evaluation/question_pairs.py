"""Compares two results question by question with paired tests: is the difference due to chance?

Both tests have the same null hypothesis: for each question, a fair coin decides which side gets which result. Both are
exact and need no seed, except that Monte Carlo replaces sign flips with too many sums or without simple fractions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean
from typing import Any

import numpy as np

from proxima.data import UserError, require
from proxima.data.json_reader import load_json
from proxima.data.random import random_bits
from proxima.evaluation.headline import ACCURACY
from proxima.evaluation.intervals import Interval, Z, bootstrap_mean, wilson_interval
from proxima.evaluation.results import OF_SUITE, EvalResult, QuestionResult, questions_sha

Questions = Mapping[int, QuestionResult]
Pairs = Sequence[tuple[QuestionResult, QuestionResult]]


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """The second result compared with the first.

    Args:
        name: suite, or `all` for the questions of all suites together.
        metric: the compared metric: `accuracy`, `reward`, `length`, `truncated`, a reward by its name, or for episodes
            `turns` or `calls`.
        questions: number compared; `left_out` more have an unknown result on one side.
        samples: per question, of first and second.
        first, second: mean of each side, with its own interval.
        difference: second minus first, from the pairs.
        p: two-sided, by the test that `test` names.
        won, lost, tied: questions for which the second is higher, lower, equal.
    """

    name: str
    metric: str
    questions: int
    left_out: int
    samples: tuple[int, int]
    first: Interval
    second: Interval
    difference: Interval
    p: float
    test: str
    won: int
    lost: int
    tied: int


def compare_results(
    first: EvalResult, second: EvalResult, *, metric: str | None = None, seed: int = 0
) -> list[PairedComparison]:
    """Compare two results: one `PairedComparison` for each common suite, and `all` if several have the same metric.

    Accuracies with one sample per question on both sides are compared by McNemar's exact test, anything else by sign
    flips of the questions' mean differences. A side's interval is Wilson's for an accuracy with one sample per
    question, otherwise a bootstrap interval. That of the difference is Tango's score interval if both sides have such
    accuracies, otherwise a paired bootstrap interval.

    Args:
        metric: one of `metrics_of`; None: the accuracy if any question of a suite has one on both sides, otherwise the
            reward.
    Raises: UserError if the results have no suite in common, no question has a value on both sides, or the questions of
        a suite differ.
    """
    comparisons: list[PairedComparison] = []
    together: list[tuple[QuestionResult, QuestionResult]] = []
    metrics: list[str] = []  # of whole suites
    for name, a, b in shared_suites(first, second):
        _check_same_questions(name, a, b)
        pairs = [(a[uid], b[uid]) for uid in a]
        of_pairs = metric or _default_metric(pairs)
        if OF_SUITE not in name:
            together += pairs
            metrics.append(of_pairs)
        elif not any(_both_known(x, y, of_pairs) for x, y in pairs):
            continue  # of a source without this metric, as one without turns
        comparisons.append(_compared(name, pairs, of_pairs, seed))
    if len(metrics) == 1 or len(set(metrics)) > 1:
        return comparisons
    return [*comparisons, _compared("all", together, metrics[0], seed)]


@dataclass(frozen=True, kw_only=True)
class ChangedQuestions:
    """The questions of a suite on which two results differ: `lost`, largest loss first, and `gained`, largest gain
    first. Each entry is the pair of results."""

    name: str
    metric: str
    lost: Pairs
    gained: Pairs

    def as_json(self, pairs: Pairs) -> list[dict[str, Any]]:
        """Each question with the values and the answers of both results, as JSON values."""
        out: list[dict[str, Any]] = []
        for a, b in pairs:
            facts = {
                "question": a.question,
                "answer": load_json(a.answer),
                "first": [a.values(self.metric), a.texts],
                "second": [b.values(self.metric), b.texts],
            }
            out.append(facts)
        return out


def changed_questions(first: EvalResult, second: EvalResult, comparison: PairedComparison) -> ChangedQuestions:
    """The questions on which the second result of a comparison is lower or higher."""
    metric = comparison.metric
    (suite,) = (suite for suite in shared_suites(first, second) if suite[0] == comparison.name)
    _, ours, theirs = suite
    changes: list[tuple[float, tuple[QuestionResult, QuestionResult]]] = []
    for uid, question in ours.items():
        other = theirs[uid]
        if _both_known(question, other, metric):
            change = fmean(_known(other, metric)) - fmean(_known(question, metric))
            changes.append((change, (question, other)))
    ordered = sorted(changes, key=lambda item: item[0])
    return ChangedQuestions(
        name=comparison.name,
        metric=metric,
        lost=[pair for change, pair in ordered if change < -1e-12],
        gained=[pair for change, pair in reversed(ordered) if change > 1e-12],
    )


def _both_known(first: QuestionResult, second: QuestionResult, metric: str) -> bool:
    """True if both have a sample with a known value."""
    return bool(_known(first, metric) and _known(second, metric))


def shared_suites(first: EvalResult, second: EvalResult) -> list[tuple[str, Questions, Questions]]:
    """Return the common suites; two results with one suite each are compared whatever the suites' names. UserError if
    there are none."""
    names = [name for name in first.suites if name in second.suites]
    if names:
        return [(name, first.suites[name], second.suites[name]) for name in names]
    ours = [name for name in first.suites if OF_SUITE not in name]
    theirs = [name for name in second.suites if OF_SUITE not in name]
    if len(ours) == len(theirs) == 1:
        named = {ours[0] + name.removeprefix(theirs[0]): questions for name, questions in second.suites.items()}
        return [(name, first.suites[name], named[name]) for name in first.suites if name in named]
    suites = " and ".join(f"{result.path} has {', '.join(result.suites) or 'none'}" for result in (first, second))
    raise UserError(f"no evaluation set in common: {suites}; evaluate both on the same")


def _check_same_questions(name: str, first: Questions, second: Questions) -> None:
    a = {uid: (each.question, each.answer) for uid, each in first.items()}
    b = {uid: (each.question, each.answer) for uid, each in second.items()}
    if a == b:
        return
    ours, theirs = (f"{len(side)} questions ({questions_sha(list(side.values()))[:12]})" for side in (a, b))
    same = sum(b.get(uid) == question for uid, question in a.items())
    remedy = "evaluate both on the same data with the same --limit and the same prompt"
    raise UserError(f"{name}: the questions differ: {ours} and {theirs}, {same} in common", remedy=remedy)


def metrics_of(result: EvalResult) -> set[str]:
    """Return the names of all metrics of the result's questions."""
    names = {ACCURACY}
    for questions in result.suites.values():
        for question in questions.values():
            names.update(question.metrics)
    return names


def _default_metric(pairs: Pairs) -> str:
    if any(_both_known(a, b, ACCURACY) for a, b in pairs):
        return ACCURACY
    return "reward"


def _compared(name: str, pairs: Pairs, metric: str, seed: int) -> PairedComparison:
    known = [(_known(a, metric), _known(b, metric)) for a, b in pairs]
    means = [(fmean(a), fmean(b)) for a, b in known if a and b]
    if not means:
        raise UserError(f"{name}: no question has a known {metric} on both sides; there is nothing to compare")
    differences = [b - a for a, b in means]
    won = sum(d > 1e-12 for d in differences)
    lost = sum(d < -1e-12 for d in differences)
    samples = (max(len(a.correct) for a, _ in pairs), max(len(b.correct) for _, b in pairs))
    of_first = metric == ACCURACY and samples[0] == 1  # one answer to each question, right or wrong
    of_second = metric == ACCURACY and samples[1] == 1
    shares = metric in (ACCURACY, "truncated")
    if of_first and of_second:
        p = mcnemar(won, lost)
        test = "McNemar, exact"
    else:
        p = sign_flip(differences, seed=seed)
        test = "sign flips"
    return PairedComparison(
        name=name,
        metric=metric,
        questions=len(means),
        left_out=len(pairs) - len(means),
        samples=samples,
        first=_mean([a for a, _ in means], of_first, shares, seed),
        second=_mean([b for _, b in means], of_second, shares, seed),
        difference=difference(differences, single=of_first and of_second, shares=shares, seed=seed),
        p=p,
        test=test,
        won=won,
        lost=lost,
        tied=len(means) - won - lost,
    )


def _known(question: QuestionResult, metric: str) -> list[float]:
    return [float(value) for value in question.values(metric) if value is not None]


def _mean(values: Sequence[float], single_answer: bool, shares: bool, seed: int) -> Interval:
    if single_answer:
        return wilson_interval(sum(values), len(values))
    span = (0.0, 1.0) if shares else None
    return bootstrap_mean(values, seed=seed, span=span)


MOST_STATES = 1_000_000  # sums that the exact distribution may range over
FLIPS = 100_000  # of the Monte Carlo test
_DENOMINATOR = 10**6


def mcnemar(won: int, lost: int) -> float:
    """McNemar's exact test for one answer per question on each side: two-sided p from the questions that exactly one
    side has right.

        p = min(1, 2 P(X <= min(won, lost))),  X ~ Binomial(won + lost, 1/2)

    Args:
        won, lost: questions that only the second side, or only the first, has right. Questions that both have right, or
            both wrong, carry no information.
    Returns: the p-value; 1 if the sides do not differ.
    Raises: ValueError for a negative count.
    Source: McNemar, Psychometrika 12 (1947) 153, in its exact binomial form.
    Edge cases: the smallest p with d differing questions is 2^(1-d), so five that all favour one side are not yet
        significant at .05.
    """
    require(won >= 0, "won", won, "must be >= 0")
    require(lost >= 0, "lost", lost, "must be >= 0")
    total = won + lost
    tail = sum(math.comb(total, i) for i in range(min(won, lost) + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2**total)))


def sign_flip(differences: Sequence[float], *, seed: int = 0) -> float:
    """The paired permutation test for means of several samples: two-sided p of the mean difference under random signs.

        p = P(|Σ s_i d_i| >= |Σ d_i|),  s_i = ±1 with probability 1/2 each

    Args:
        differences: d_i of each question, second minus first; differences of shares of few samples are fractions with
            small denominators.
        seed: of the flips if the exact test is too large (see Differs).
    Returns: the p-value; 1 if no question differs. For d_i in {-1, 0, 1} it is McNemar's exact p.
    Source: Fisher, The Design of Experiments (1935), section 21.
    Differs: the usual test uses Monte Carlo. Here the d_i get a common denominator and the distribution of the sum is
        built question by question, exact up to float64. If that takes over a million sums, or the values are not such
        fractions (means of rewards), 100,000 seeded flips are used: p = (1 + flips with a sum at least as far from 0) /
        (1 + flips).
    """
    differing = [d for d in differences if abs(d) > 1e-12]
    if not differing:
        return 1.0
    steps = _as_integers(differing)
    if steps is None or 2 * sum(map(abs, steps)) + 1 > MOST_STATES:
        return _by_flips(np.asarray(differing), seed)
    reach = sum(map(abs, steps))
    chance = np.zeros(2 * reach + 1)
    chance[reach] = 1.0
    for step in sorted(map(abs, steps)):
        # nothing reaches the ends before the last step: no wrap
        chance = 0.5 * (np.roll(chance, step) + np.roll(chance, -step))
    far = abs(sum(steps))
    away = np.abs(np.arange(-reach, reach + 1))
    return float(min(1.0, chance[away >= far].sum()))


def difference(differences: Sequence[float], *, single: bool = False, shares: bool = True, seed: int = 0) -> Interval:
    """The mean difference with its 95 % interval: BCa bootstrap over the questions, each with the results of both
    sides.

    Args:
        differences: second minus first, per question.
        single: one answer per question on both sides, so that each is -1, 0 or 1: Tango's score interval, which keeps
            its 95 % even if few questions differ (`paired_score`).
        shares: the differences are in [-1, 1]; False for rewards.
    Raises: ValueError without questions, or if single answers differ by anything other than -1, 0 or 1.
    """
    if single:
        are_signs = all(d in (-1, 0, 1) for d in differences)
        require(are_signs, "differences", list(differences), "must be -1, 0 or 1 for single answers")
        won = differences.count(1)
        lost = differences.count(-1)
        n = len(differences)
        low, high = paired_score(won, lost, n)
        return Interval(value=(won - lost) / n, low=low, high=high, method="score", questions=n)
    span = (-1.0, 1.0) if shares else None
    return bootstrap_mean(differences, seed=seed, span=span)


def _as_integers(values: Sequence[float]) -> list[int] | None:
    """Return the numerators over a common denominator of at most a million; None if there is none."""
    fractions = [Fraction(value).limit_denominator(10_000) for value in values]
    if any(abs(float(fraction) - value) > 1e-12 for fraction, value in zip(fractions, values, strict=True)):
        return None
    common = math.lcm(*(fraction.denominator for fraction in fractions))
    if common <= _DENOMINATOR:
        return [int(fraction * common) for fraction in fractions]
    return None


def _by_flips(values: np.ndarray, seed: int) -> float:
    n = len(values)
    far = abs(float(values.sum())) * (1 - 1e-12)
    extreme = 0
    rows = max(1, 4_000_000 // n)
    for start in range(0, FLIPS, rows):
        bits = random_bits(seed, start, min(FLIPS, start + rows), n) & 1
        signs = bits.astype(np.float64) * 2 - 1
        extreme += int((np.abs(signs @ values) >= far).sum())
    return (1 + extreme) / (1 + FLIPS)


def paired_score(won: int, lost: int, questions: int) -> tuple[float, float]:
    """Tango's 95 % score interval of the difference of two accuracies on the same questions, one answer each.

    The bounds are the most extreme differences D that a score test does not reject:

        (won - lost - n D)² = z² n (2 q + D (1 - D))
        q = (sqrt(B² + 8 n c D (1 - D)) - B) / 4n,  B = (2n - won + lost) D - won - lost,  c = lost
        the share lost, given D

    Exact coverage, summed over all outcomes, if neither side is better and a share of the questions is right on one
    side only:

        questions, share    200, .02    200, .05    200, .1    30, .1    1,000, .01
        this                    .958        .957       .948      .969          .957
        BCa bootstrap           .903        .929       .949      .909
        which can only repeat the handful of questions that differ

    Args:
        won, lost: questions that only the second side, or only the first, has right.
        questions: n, including those with the same outcome on both sides.
    Returns: the bounds, in [-1, 1]; won = lost = 0: plus and minus z² / (n + z²), the Wilson bound on a share of 0.
    Raises: ValueError for impossible counts.
    Source: Tango, Statistics in Medicine 17 (1998) 891.
    Differs: Newcombe's method 10 (1998) also needs the number of questions that both have right; this one only needs
        those that differ.
    """
    require(won >= 0, "won", won, "must be >= 0")
    require(lost >= 0, "lost", lost, "must be >= 0")
    require(questions >= max(1, won + lost), "questions", questions, f"must be >= 1 and >= won + lost = {won + lost}")
    return -_upper_score(lost, won, questions), _upper_score(won, lost, questions)


def _upper_score(won: int, lost: int, n: int) -> float:
    """The largest D in [(won - lost) / n, 1] that the score test does not reject, by bisection to the last bit."""
    low = (won - lost) / n
    high = 1.0
    while low < (middle := (low + high) / 2) < high:
        b = (2 * n - won + lost) * middle - won - lost
        root = abs(b)
        if lost:
            root = math.sqrt(b * b + 8 * n * lost * middle * (1 - middle))
        variance = n * ((root - b) / (2 * n) + middle * (1 - middle))
        if (won - lost - n * middle) ** 2 <= Z * Z * variance:
            low = middle
        else:
            high = middle
    return high
