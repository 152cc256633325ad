"""Two results compared question by question."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxima.data import UserError
from proxima.evaluate.estimators import mean_at_k
from proxima.evaluate.intervals import Interval, bootstrap_mean, wilson_interval
from proxima.evaluate.paired import difference, mcnemar, sign_flip
from proxima.evaluate.results import EvalResult, QuestionResult, questions_sha

Questions = Mapping[int, QuestionResult]


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """The second result compared with the first.

    Args:
        name: suite, or `all` for the questions of all suites together.
        questions: compared ones; `left_out` more have an unknown result on one side.
        samples: per question, first and second.
        first, second: mean accuracy of each, with its own interval.
        difference: second minus first, from the pairs.
        p: two-sided, by the test that `test` names.
        won, lost, tied: questions for which the second is better, worse, equal.
    """

    name: str
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


def compare_results(first: EvalResult, second: EvalResult, *, seed: int = 0) -> list[PairedComparison]:
    """One `PairedComparison` for each suite that both have, and `all` if there are several.

    With one sample per question on both sides: McNemar's exact test; otherwise sign flips of the questions' mean
    differences. The intervals of the sides are Wilson's for one sample, bootstrap for several; that of the difference
    is Tango's score interval for one sample on both sides, otherwise the paired bootstrap's.

    Raises: UserError without a suite in common or a score on both sides, or if the questions of a suite differ.
    """
    comparisons = []
    together: list[tuple[QuestionResult, QuestionResult]] = []
    for name, a, b in shared_suites(first, second):
        _check_same_questions(name, a, b)
        pairs = [(a[uid], b[uid]) for uid in a]
        together += pairs
        comparisons.append(_compared(name, pairs, seed))
    return [*comparisons, _compared("all", together, seed)] if len(comparisons) > 1 else comparisons


def shared_suites(first: EvalResult, second: EvalResult) -> list[tuple[str, Questions, Questions]]:
    """The suites that both have; two results of one suite each are compared whatever its names; UserError without
    any."""
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


def _compared(name: str, pairs: Sequence[tuple[QuestionResult, QuestionResult]], seed: int) -> PairedComparison:
    means = [(_mean(a.correct), _mean(b.correct)) for a, b in pairs]
    known = [(a, b) for a, b in means if a is not None and b is not None]
    if not known:
        raise UserError(f"{name}: no question has a score on both sides; there is nothing to compare")
    differences = [b - a for a, b in known]
    won, lost = sum(d > 1e-12 for d in differences), sum(d < -1e-12 for d in differences)
    samples = (max(len(a.correct) for a, _ in pairs), max(len(b.correct) for _, b in pairs))
    single = samples == (1, 1)
    return PairedComparison(
        name=name,
        questions=len(known),
        left_out=len(pairs) - len(known),
        samples=samples,
        first=_accuracy([a for a, _ in known], samples[0], seed),
        second=_accuracy([b for _, b in known], samples[1], seed),
        difference=difference(differences, single=single, seed=seed),
        p=mcnemar(won, lost) if single else sign_flip(differences, seed=seed),
        test="McNemar, exact" if single else "sign flips",
        won=won,
        lost=lost,
        tied=len(known) - won - lost,
    )


def _mean(correct: Sequence[bool | None]) -> float | None:
    judged = [right for right in correct if right is not None]
    return mean_at_k(judged) if judged else None


def _accuracy(values: Sequence[float], samples: int, seed: int) -> Interval:
    return bootstrap_mean(values, seed=seed) if samples > 1 else wilson_interval(sum(values), len(values))
