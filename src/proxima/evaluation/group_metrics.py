"""Metrics of an evaluation from scored groups, each with its interval.

Samples without a valid score count as `invalid` and are in no metric of rewards or correctness. A question with fewer
than k judged samples has no pass@k and no maj@k; `questions` of a metric counts the questions that have it.
"""

import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
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
        return mean_at_k(self.judged) if self.judged else None

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
    begun = group.prompt.begun
    votes = tuple(None if extract is None else canonical(extract(c, begun)) for c in group.completions)
    return QuestionScores(correct=correct, votes=votes)


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
    judged = [right for question in questions for right in question.judged]
    if not judged:
        return {}
    if samples == 1:
        return {"accuracy": wilson_interval(sum(judged), len(judged))}
    metrics: dict[str, Callable[[QuestionScores], float | None]] = {f"mean@{samples}": QuestionScores.mean}
    metrics |= {f"pass@{k}": partial(QuestionScores.passed, k=k) for k in ks if k > 1}
    if vote:
        metrics |= {f"maj@{k}": partial(QuestionScores.majority, k=k) for k in ks if k > 1}
    values = {name: [v for q in questions if (v := metric(q)) is not None] for name, metric in metrics.items()}
    return {name: bootstrap_mean(of, seed=seed) for name, of in values.items() if of}


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
    pairs = [(c, s) for group in groups for c, s in zip(group.completions, group.scores, strict=True)]
    judged = [right for question in questions for right in question.judged]
    lengths = [completion.generated for completion, _ in pairs]
    votes = [vote for question in questions for vote in question.votes]
    intervals = estimates(questions, samples, ks, vote=extract is not None, seed=seed)
    intervals |= (means := mean_estimates(groups, seed=seed))
    episodes = episode_metrics([completion for completion, _ in pairs])
    return {
        "questions": len(groups),
        "samples": samples,
        "answers": len(pairs),
        "correct": sum(judged),
        "known": len(judged),
        "invalid": sum(not score.valid for _, score in pairs),
        "estimates": {name: asdict(interval) for name, interval in intervals.items()},
        "reward": means[REWARD].value if REWARD in means else None,
        "length": {"mean": statistics.fmean(lengths), "median": statistics.median(lengths), "max": max(lengths)}
        if lengths
        else None,
        "truncated": sum(completion.truncated for completion, _ in pairs) / len(pairs) if pairs else None,
        "unanswered": sum(vote is None for vote in votes) / len(votes) if votes and extract is not None else None,
        "tokens": sum(lengths),
        **({"episodes": episodes | role_metrics(groups)} if episodes else {}),
    }


def mean_estimates(groups: Sequence[Group], *, seed: int = 0) -> dict[str, Interval]:
    """Average the figures that need no verdict on correctness, over samples and then over questions, with 95 %
    intervals.

    Returns: `reward/mean`; each reward before its weight and each part of it, `reward/part/<name>`; `length/mean`,
        tokens; `truncated_fraction`. A sample without a valid score has no reward; figures that no sample has are left
        out. The range of a reward is unknown, so equal values for all questions give an interval of width 0
        (`bootstrap_mean`).
    """
    valid = [[score for score in group.scores if score.valid] for group in groups]
    parts = dict.fromkeys(part for scores in valid for score in scores for part in score.parts)
    values = {REWARD: [[score.value for score in scores] for scores in valid]}
    values |= {PART + part: [[s.parts[part] for s in scores if part in s.parts] for scores in valid] for part in parts}
    values["length/mean"] = [[float(completion.generated) for completion in group.completions] for group in groups]
    values[CUT] = [[float(completion.truncated) for completion in group.completions] for group in groups]
    means = {key: tuple(statistics.fmean(question) for question in of if question) for key, of in values.items()}
    tasks = {key: (of, (0.0, 1.0) if key == CUT else None) for key, of in means.items() if of}
    intervals = {task: bootstrap_mean(task[0], seed=seed, span=task[1]) for task in set(tasks.values())}  # some equal
    return {key: intervals[task] for key, task in tasks.items()}
