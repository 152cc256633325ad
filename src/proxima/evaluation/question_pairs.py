"""Two results compared question by question."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from proxima.data import UserError
from proxima.data.json_reader import load_json
from proxima.evaluation.headline import ACCURACY
from proxima.evaluation.intervals import Interval, bootstrap_mean, wilson_interval
from proxima.evaluation.paired import difference, mcnemar, sign_flip
from proxima.evaluation.results import EvalResult, QuestionResult, questions_sha

Questions = Mapping[int, QuestionResult]
Pairs = Sequence[tuple[QuestionResult, QuestionResult]]


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """The second result compared with the first.

    Args:
        name: suite, or `all` for the questions of all suites together.
        metric: the compared metric: `accuracy`, `reward`, `length`, `truncated` or a reward by its name.
        questions: number compared; `left_out` more have an unknown result on one side.
        samples: per question, of first and second.
        first, second: mean of each, with its own interval.
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
    """Compare two results: one `PairedComparison` for each common suite, and `all` if there are several.

    Accuracies with one sample per question on both sides: McNemar's exact test; anything else: sign flips of the
    questions' mean differences. The intervals of the sides are Wilson's for such accuracies, otherwise bootstrap; that
    of the difference is Tango's score interval for one sample on both sides, otherwise the paired bootstrap's.

    Args:
        metric: one of `metrics_of`; None: the accuracy if any question of a suite has one on both sides, otherwise the
            reward.
    Raises: UserError without a suite in common or a value on both sides, or if the questions of a suite differ.
    """
    comparisons = []
    together: list[tuple[QuestionResult, QuestionResult]] = []
    for name, a, b in shared_suites(first, second):
        _check_same_questions(name, a, b)
        pairs = [(a[uid], b[uid]) for uid in a]
        together += pairs
        comparisons.append(_compared(name, pairs, metric or _default_metric(pairs), seed))
    of_all = {comparison.metric for comparison in comparisons}
    if len(comparisons) == 1 or len(of_all) > 1:
        return comparisons
    return [*comparisons, _compared("all", together, of_all.pop(), seed)]


@dataclass(frozen=True, kw_only=True)
class ChangedQuestions:
    """The questions of a suite on which the second result differs from the first: `lost` ones, the largest loss first,
    and `gained` ones, the largest gain first; each the two results."""

    name: str
    metric: str
    lost: Pairs
    gained: Pairs

    def as_json(self, pairs: Pairs) -> list[dict[str, Any]]:
        """Questions with the values and the answers of both results."""
        return [
            {
                "question": a.question,
                "answer": load_json(a.answer),
                "first": [a.values(self.metric), a.texts],
                "second": [b.values(self.metric), b.texts],
            }
            for a, b in pairs
        ]


def changed_questions(first: EvalResult, second: EvalResult, comparison: PairedComparison) -> ChangedQuestions:
    """The questions that won or lost in the comparison of a suite."""
    metric = comparison.metric
    (sides,) = ((a, b) for name, a, b in shared_suites(first, second) if name == comparison.name)
    pairs = [(question, sides[1][uid]) for uid, question in sides[0].items()]
    means = [(fmean(known[1]) - fmean(known[0]), pair) for pair in pairs if all(known := _both(pair, metric))]
    ordered = sorted(means, key=lambda item: item[0])
    return ChangedQuestions(
        name=comparison.name,
        metric=metric,
        lost=[pair for change, pair in ordered if change < -1e-12],
        gained=[pair for change, pair in reversed(ordered) if change > 1e-12],
    )


def _both(pair: tuple[QuestionResult, QuestionResult], metric: str) -> tuple[list[float], list[float]]:
    return _known(pair[0], metric), _known(pair[1], metric)


def shared_suites(first: EvalResult, second: EvalResult) -> list[tuple[str, Questions, Questions]]:
    """Return the common suites; two results with one suite each are compared whatever the suites' names. UserError
    without any."""
    names = [name for name in first.suites if name in second.suites]
    if names:
        return [(name, first.suites[name], second.suites[name]) for name in names]
    if len(first.suites) == len(second.suites) == 1:
        ((name, a),), (b,) = first.suites.items(), second.suites.values()
        return [(name, a, b)]
    suites = " and ".join(f"{result.path} has {', '.join(result.suites) or 'none'}" for result in (first, second))
    raise UserError(f"no evaluation set in common: {suites}; evaluate both on the same")


def _check_same_questions(name: str, first: Questions, second: Questions) -> None:
    a, b = ({uid: (q.question, q.answer) for uid, q in side.items()} for side in (first, second))
    if a == b:
        return
    counts = [f"{len(side)} questions ({questions_sha(list(side.values()))[:12]})" for side in (a, b)]
    same = sum(b.get(uid) == question for uid, question in a.items())
    remedy = "evaluate both on the same data with the same --limit and the same prompt"
    raise UserError(f"{name}: the questions differ: {counts[0]} and {counts[1]}, {same} in common", remedy=remedy)


def metrics_of(result: EvalResult) -> set[str]:
    """Return the names of all metrics of the result's questions."""
    return {ACCURACY, *(name for of in result.suites.values() for question in of.values() for name in question.metrics)}


def _default_metric(pairs: Pairs) -> str:
    judged = any(_known(a, ACCURACY) and _known(b, ACCURACY) for a, b in pairs)
    return ACCURACY if judged else "reward"


def _compared(name: str, pairs: Pairs, metric: str, seed: int) -> PairedComparison:
    sides = [(_known(a, metric), _known(b, metric)) for a, b in pairs]
    means = [(fmean(a), fmean(b)) for a, b in sides if a and b]
    if not means:
        raise UserError(f"{name}: no question has a known {metric} on both sides; there is nothing to compare")
    differences = [b - a for a, b in means]
    won, lost = sum(d > 1e-12 for d in differences), sum(d < -1e-12 for d in differences)
    samples = (max(len(a.correct) for a, _ in pairs), max(len(b.correct) for _, b in pairs))
    single, shares = samples == (1, 1) and metric == ACCURACY, metric in (ACCURACY, "truncated")
    single_answers = [metric == ACCURACY and count == 1 for count in samples]
    return PairedComparison(
        name=name,
        metric=metric,
        questions=len(means),
        left_out=len(pairs) - len(means),
        samples=samples,
        first=_mean([a for a, _ in means], single_answers[0], shares, seed),
        second=_mean([b for _, b in means], single_answers[1], shares, seed),
        difference=difference(differences, single=single, shares=shares, seed=seed),
        p=mcnemar(won, lost) if single else sign_flip(differences, seed=seed),
        test="McNemar, exact" if single else "sign flips",
        won=won,
        lost=lost,
        tied=len(means) - won - lost,
    )


def _known(question: QuestionResult, metric: str) -> list[float]:
    return [float(value) for value in question.values(metric) if value is not None]


def _mean(values: Sequence[float], single_answer: bool, shares: bool, seed: int) -> Interval:
    if single_answer:
        return wilson_interval(sum(values), len(values))
    return bootstrap_mean(values, seed=seed, span=(0.0, 1.0) if shares else None)
