"""From scored groups to the figures of an evaluation, each with its interval.

A failed scorer (`valid=False`) says nothing of the answer: the sample enters no figure and is counted under `invalid`.
A question of which fewer than k samples are left has no pass@k and no maj@k, and is left out of them; `questions` of a
figure says over how many it is.
"""

import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from proxima.data import Group, require
from proxima.evaluate.estimators import maj_at_k, mean_at_k, pass_at_k
from proxima.evaluate.intervals import Interval, bootstrap_mean, wilson
from proxima.evaluate.votes import canonical


@dataclass(frozen=True, kw_only=True)
class QuestionScores:
    """What the samples of one question came to; entries in the order of the samples.

    Args:
        correct: whether the sample is right; None where no reward knows, or the scorer failed.
        votes: the canonical answer; None where there is none, or nobody can tell.
    """

    correct: tuple[bool | None, ...]
    votes: tuple[Hashable | None, ...]

    def __post_init__(self) -> None:
        require(
            len(self.votes) == len(self.correct),
            "votes",
            len(self.votes),
            f"must be as many as correct ({len(self.correct)})",
        )

    @property
    def known(self) -> list[bool]:
        """The samples of which it is known."""
        return [one for one in self.correct if one is not None]

    def mean(self) -> float | None:
        """mean@k; None where nothing is known."""
        return mean_at_k(self.known) if self.known else None

    def passed(self, k: int) -> float | None:
        """pass@k; None with fewer than k known samples."""
        known = self.known
        return pass_at_k(len(known), sum(known), k) if len(known) >= k else None

    def majority(self, k: int) -> float | None:
        """maj@k; None with fewer than k known samples."""
        pairs = [(vote, one) for vote, one in zip(self.votes, self.correct, strict=True) if one is not None]
        return maj_at_k([vote for vote, _ in pairs], [one for _, one in pairs], k) if len(pairs) >= k else None


def question_scores(group: Group, extract: Callable[[str], str | None] | None) -> QuestionScores:
    """The scores of a group; `extract` finds the answer in a text (`votes.answer_extractor`), None if nothing can."""
    correct = tuple(score.correct if score.valid else None for score in group.scores)
    votes = tuple(None if extract is None else canonical(extract(completion.text)) for completion in group.completions)
    return QuestionScores(correct=correct, votes=votes)


def powers_of_two(samples: int) -> tuple[int, ...]:
    """1, 2, 4 … and `samples` itself."""
    return tuple(sorted({1 << i for i in range(samples.bit_length()) if 1 << i <= samples} | {samples}))


def check_ks(ks: Sequence[int], samples: int) -> None:
    """Refuse a k that the samples can't answer, before anything is generated.

    Raises:
        ValueError: k < 1 or k > samples; says what to change.
    """
    for k in ks:
        require(k >= 1, "k", k, "must be >= 1")
        remedy = f"pass@{k} and maj@{k} need {k} answers a question; take --samples {k}, or a smaller k"
        require(k <= samples, "k", k, f"must be <= samples={samples}: {remedy}")


def estimates(
    questions: Sequence[QuestionScores], samples: int, ks: Sequence[int], *, vote: bool, seed: int = 0
) -> dict[str, Interval]:
    """`greedy`-like accuracy and, for several samples, mean@n, pass@k and maj@k, each with its 95 % interval.

    One sample a question: `accuracy` with the Wilson interval. Several: bootstrap over the questions. A figure that no
    question has is left out. `accuracy` is the share of right answers among those known, `mean@n` the mean over
    questions of their own
    shares: the same unless scorers failed.
    """
    known = [one for question in questions for one in question.known]
    if not known:
        return {}
    if samples == 1:
        low, high = wilson(sum(known), len(known))
        return {
            "accuracy": Interval(
                value=sum(known) / len(known), low=low, high=high, method="wilson", questions=len(known)
            )
        }
    wanted: dict[str, Callable[[QuestionScores], float | None]] = {f"mean@{samples}": QuestionScores.mean}
    wanted |= {f"pass@{k}": partial(QuestionScores.passed, k=k) for k in ks if k > 1}
    if vote:
        wanted |= {f"maj@{k}": partial(QuestionScores.majority, k=k) for k in ks if k > 1}
    found = {}
    for name, figure in wanted.items():
        values = [value for question in questions if (value := figure(question)) is not None]
        if values:
            found[name] = bootstrap_mean(values, seed=seed)
    return found


def eval_metrics(
    groups: Sequence[Group],
    *,
    samples: int,
    ks: Sequence[int] = (),
    extract: Callable[[str], str | None] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Every figure of an evaluation, as JSON values.

    Args:
        groups: the questions with their completions and scores.
        samples: completions a question.
        ks: of pass@k and maj@k, each 1 … samples; empty: powers of two and `samples`.
        extract: takes the answer out of a text; None: no vote, and `unanswered` is null.
        seed: of the bootstrap.
    Returns: `questions`, `samples`, `answers`, `correct`, `invalid`, `estimates` {name: value, low, high, method,
        questions}, `reward`, `length` (tokens: mean, median, max), `truncated` and `unanswered` (shares of the
        answers), `tokens`.
    """
    ks = tuple(sorted(set(ks))) or powers_of_two(samples)
    check_ks(ks, samples)
    questions = [question_scores(group, extract) for group in groups]
    pairs = [(c, s) for group in groups for c, s in zip(group.completions, group.scores, strict=True)]
    known = [one for question in questions for one in question.known]
    lengths = [len(completion.tokens) for completion, _ in pairs]
    values = [score.value for _, score in pairs if score.valid]
    votes = [vote for question in questions for vote in question.votes]
    found = estimates(questions, samples, ks, vote=extract is not None, seed=seed)
    return {
        "questions": len(groups),
        "samples": samples,
        "answers": len(pairs),
        "correct": sum(known),
        "known": len(known),
        "invalid": sum(not score.valid for _, score in pairs),
        "estimates": {name: asdict(interval) for name, interval in found.items()},
        "reward": statistics.fmean(values) if values else None,
        "length": {"mean": statistics.fmean(lengths), "median": statistics.median(lengths), "max": max(lengths)}
        if lengths
        else None,
        "truncated": sum(completion.truncated for completion, _ in pairs) / len(pairs) if pairs else None,
        "unanswered": sum(vote is None for vote in votes) / len(votes) if votes and extract is not None else None,
        "tokens": sum(lengths),
    }
