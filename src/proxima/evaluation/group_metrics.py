"""Metrics of an evaluation from scored groups, each with its interval.

Samples without a valid score count as `invalid` and are in no metric of rewards or correctness. A question with fewer
than k judged samples has no pass@k and no maj@k; `questions` of a metric counts the questions that have it.
"""

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

from proxima.data import require
from proxima.data.flow import Group
from proxima.data.players import role_metrics
from proxima.evaluation.estimators import maj_at_k, mean_at_k, pass_at_k, powers_of_two
from proxima.evaluation.headline import CUT, REWARD
from proxima.evaluation.intervals import PART, Interval, bootstrap_mean, wilson_interval
from proxima.evaluation.votes import Extract, canonical
from proxima.rollout.episodes.figures import episode_metrics


@dataclass(frozen=True, kw_only=True)
class QuestionScores:
    """Scores of the samples of one question, in order.

    Args:
        correct: True for a right sample; None if no reward decides, or the score is invalid.
        votes: the canonical answer; None without one.
    """

    correct: tuple[bool | None, ...]
    votes: tuple[Hashable | None, ...]

    @property
    def judged(self) -> list[bool]:
        """The entries of `correct` that are not None."""
        return [right for right in self.correct if right is not None]

    def mean(self) -> float | None:
        """mean@k; None without a judged sample."""
        judged = self.judged
        if not judged:
            return None
        return mean_at_k(judged)

    def passed(self, k: int) -> float | None:
        """pass@k; None with fewer than k judged samples."""
        judged = self.judged
        if len(judged) >= k:
            return pass_at_k(len(judged), sum(judged), k)
        return None

    def majority(self, k: int) -> float | None:
        """maj@k; None with fewer than k judged samples."""
        votes = [vote for vote, right in zip(self.votes, self.correct, strict=True) if right is not None]
        if len(votes) >= k:
            return maj_at_k(votes, self.judged, k)
        return None


def question_scores(group: Group, extract: Extract | None) -> QuestionScores:
    """The scores of a group; `extract` finds the answer (see `votes.answer_extractor`); None: no votes."""
    correct = tuple(score.correct if score.valid else None for score in group.scores)
    votes: list[Hashable | None] = [None] * len(group.completions)
    if extract is not None:
        votes = [canonical(extract(completion, group.prompt.begun)) for completion in group.completions]
    return QuestionScores(correct=correct, votes=tuple(votes))


def check_ks(ks: Sequence[int], samples: int) -> None:
    """Raise a FieldError for a k that needs more samples, before anything is generated."""
    for k in ks:
        require(k >= 1, "k", k, "must be >= 1")
        remedy = f"pass@{k} and maj@{k} need {k} answers per question; use --samples {k}, or a smaller k"
        require(k <= samples, "k", k, f"must be <= samples={samples}: {remedy}")


def estimates(
    questions: Sequence[QuestionScores], samples: int, ks: Sequence[int], *, vote: bool, seed: int = 0
) -> dict[str, Interval]:
    """Accuracy, or with several samples mean@n, pass@k and maj@k, each with its 95 % interval.

    One sample per question: `accuracy`, the share of right answers among the judged ones, with the Wilson interval.
    Several: means over questions, with bootstrap intervals. A metric that no question has is left out; so is maj@k
    unless `vote` is set.
    """
    judged = _judged(questions)
    if not judged:
        return {}
    if samples == 1:
        return {"accuracy": wilson_interval(sum(judged), len(judged))}
    metrics: dict[str, Callable[[QuestionScores], float | None]] = {f"mean@{samples}": QuestionScores.mean}
    metrics |= {f"pass@{k}": partial(QuestionScores.passed, k=k) for k in ks if k > 1}
    if vote:
        metrics |= {f"maj@{k}": partial(QuestionScores.majority, k=k) for k in ks if k > 1}
    intervals: dict[str, Interval] = {}
    for name, metric in metrics.items():
        of_questions = [metric(question) for question in questions]
        known = [value for value in of_questions if value is not None]
        if known:
            intervals[name] = bootstrap_mean(known, seed=seed)
    return intervals


def _judged(questions: Iterable[QuestionScores]) -> list[bool]:
    """Whether each judged sample of the questions is right."""
    return list(chain.from_iterable(question.judged for question in questions))


def eval_metrics(
    groups: Sequence[Group], *, samples: int, ks: Sequence[int] = (), extract: Extract | None = None, seed: int = 0
) -> dict[str, Any]:
    """All metrics of an evaluation, as JSON values.

    Args:
        samples: completions per question.
        ks: the k of pass@k and maj@k, each in 1 … samples; empty: powers of two and `samples`.
        extract: finds the answer; None: no vote, and `unanswered` is None.
        seed: of the bootstrap.
    Returns: `questions`, `samples`, `answers`, `correct`, `known` (answers that a reward judged), `invalid`,
        `estimates` {name: value, low, high, method, questions} including those of `mean_estimates`, `reward`, `length`
        (tokens: mean, median, max), `truncated` and `unanswered` (shares of the answers), `tokens`; `episodes`
        (`episode_metrics` and `role_metrics`) if the answers are episodes.
    Raises: FieldError for a k outside 1 … samples.
    """
    ks = tuple(sorted(set(ks))) or powers_of_two(samples)
    check_ks(ks, samples)
    questions = [question_scores(group, extract) for group in groups]
    completions = list(chain.from_iterable(group.completions for group in groups))
    scores = list(chain.from_iterable(group.scores for group in groups))
    judged = _judged(questions)
    lengths = [completion.generated for completion in completions]
    intervals = estimates(questions, samples, ks, vote=extract is not None, seed=seed)
    means = mean_estimates(groups, seed=seed)
    intervals |= means

    reward = None
    if REWARD in means:
        reward = means[REWARD].value
    length = None
    truncated = None
    unanswered = None
    if completions:
        length = {"mean": statistics.fmean(lengths), "median": statistics.median(lengths), "max": max(lengths)}
        truncated = sum(completion.truncated for completion in completions) / len(completions)
        if extract is not None:
            without_vote = sum(vote is None for question in questions for vote in question.votes)
            unanswered = without_vote / len(completions)
    facts: dict[str, Any] = {
        "questions": len(groups),
        "samples": samples,
        "answers": len(completions),
        "correct": sum(judged),
        "known": len(judged),
        "invalid": sum(not score.valid for score in scores),
        "estimates": {name: asdict(interval) for name, interval in intervals.items()},
        "reward": reward,
        "length": length,
        "truncated": truncated,
        "unanswered": unanswered,
        "tokens": sum(lengths),
    }
    episodes = episode_metrics(completions)
    if episodes:
        facts["episodes"] = episodes | role_metrics(groups)
    return facts


def mean_estimates(groups: Sequence[Group], *, seed: int = 0) -> dict[str, Interval]:
    """Average the figures that need no verdict on correctness, over samples and then over questions, with 95 %
    intervals.

    Returns: `reward/mean`; each reward before its weight and each part of it, `reward/part/<name>`; `length/mean`,
        tokens; `truncated_fraction`. A sample without a valid score has no reward; figures that no sample has are left
        out. The range of a reward is unknown, so equal values for all questions give an interval of width 0
        (`bootstrap_mean`).
    """
    valid = [[score for score in group.scores if score.valid] for group in groups]
    values = {REWARD: [[score.value for score in scores] for scores in valid]}  # of the samples of each question
    for part in dict.fromkeys(part for score in chain.from_iterable(valid) for part in score.parts):
        values[PART + part] = [[score.parts[part] for score in scores if part in score.parts] for scores in valid]
    values["length/mean"] = [[float(completion.generated) for completion in group.completions] for group in groups]
    values[CUT] = [[float(completion.truncated) for completion in group.completions] for group in groups]

    intervals: dict[str, Interval] = {}
    known: dict[Hashable, Interval] = {}  # of equal values: a bootstrap takes long
    for name, questions in values.items():
        means = tuple(statistics.fmean(question) for question in questions if question)
        if not means:
            continue
        span = (0.0, 1.0) if name == CUT else None
        if (means, span) not in known:
            known[means, span] = bootstrap_mean(means, seed=seed, span=span)
        intervals[name] = known[means, span]
    return intervals
