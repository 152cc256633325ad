"""Two results, question by question."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxima.data import UserError
from proxima.evaluate.intervals import Interval, bootstrap_mean, wilson
from proxima.evaluate.paired import difference, mcnemar, sign_flip
from proxima.evaluate.results import EvalResult, QuestionResult, questions_sha


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """What the second result is against the first.

    Args:
        name: suite, or `all` for the questions of all suites together.
        questions: compared; `left_out` more have no known answer on one side.
        samples: a question, first and second.
        first, second: mean accuracy of each, with its own interval.
        difference: second minus first, from the pairs.
        p: two-sided; `test` says which test.
        won, lost, tied: questions where the second is better, worse, the same.
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
    """One `PairedComparison` a suite that both have, and `all` where there are several.

    One sample a question on both sides: McNemar's exact test; otherwise sign flips of the questions' mean differences.
    The intervals of the sides are Wilson's for one sample, bootstrap for several; that of the difference is
    Tango's score interval for one sample on both sides, the paired bootstrap's otherwise.

    Raises:
        ValueError: no suite in common, other questions under one name (with counts and hashes), or no reward that knows
            what is right.
    """
    pairs = common(first, second)
    found = []
    both: list[tuple[QuestionResult, QuestionResult]] = []
    for name, mine, theirs in pairs:
        _same_questions(name, mine, theirs)
        asked = [(mine[uid], theirs[uid]) for uid in mine]
        both += asked
        found.append(_compared(name, asked, seed))
    return [*found, _compared("all", both, seed)] if len(found) > 1 else found


def common(
    first: EvalResult, second: EvalResult
) -> list[tuple[str, Mapping[int, QuestionResult], Mapping[int, QuestionResult]]]:
    """The suites that both have; two results of one suite each are compared whatever it is called.

    Raises:
        ValueError: they have none in common.
    """
    names = [name for name in first.suites if name in second.suites]
    if names:
        return [(name, first.suites[name], second.suites[name]) for name in names]
    if len(first.suites) == len(second.suites) == 1:
        ((name, mine),), (theirs,) = first.suites.items(), second.suites.values()
        return [(name, mine, theirs)]
    held = " and ".join(f"{result.path} holds {', '.join(result.suites) or 'none'}" for result in (first, second))
    raise UserError(f"no evaluation set in common: {held}; evaluate both on the same")


def _same_questions(name: str, mine: Mapping[int, QuestionResult], theirs: Mapping[int, QuestionResult]) -> None:
    if {uid: (a.question, a.answer) for uid, a in mine.items()} == {
        uid: (a.question, a.answer) for uid, a in theirs.items()
    }:
        return
    shared = sum(
        uid in theirs and (a.question, a.answer) == (theirs[uid].question, theirs[uid].answer)
        for uid, a in mine.items()
    )
    told = [
        f"{len(side)} questions ({questions_sha([(a.question, a.answer) for a in side.values()])[:12]})"
        for side in (mine, theirs)
    ]
    raise UserError(
        f"{name}: the questions differ: {told[0]} against {told[1]}, {shared} the same; "
        "evaluate both on the same data with the same --limit and the same prompt"
    )


def _compared(name: str, asked: Sequence[tuple[QuestionResult, QuestionResult]], seed: int) -> PairedComparison:
    means = [(_mean(a.correct), _mean(b.correct)) for a, b in asked]
    known = [(a, b) for a, b in means if a is not None and b is not None]
    if not known:
        raise UserError(f"{name}: no question whose answers a reward judged on both sides; there is nothing to compare")
    differences = [b - a for a, b in known]
    won, lost = sum(d > 1e-12 for d in differences), sum(d < -1e-12 for d in differences)
    samples = (max(len(a.correct) for a, _ in asked), max(len(b.correct) for _, b in asked))
    single = samples == (1, 1)
    return PairedComparison(
        name=name,
        questions=len(known),
        left_out=len(asked) - len(known),
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
    known = [one for one in correct if one is not None]
    return sum(known) / len(known) if known else None


def _accuracy(values: Sequence[float], samples: int, seed: int) -> Interval:
    if samples > 1:
        return bootstrap_mean(values, seed=seed)
    low, high = wilson(sum(values), len(values))
    return Interval(value=sum(values) / len(values), low=low, high=high, method="wilson", questions=len(values))
