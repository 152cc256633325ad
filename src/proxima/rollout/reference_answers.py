"""Checks before the weights are loaded that the rewards are ready, that the rows have the columns that they ask for,
and that they can read the reference answers.

Generation for a row whose answer no reward can read is wasted: all its scores are invalid.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxima.data import FieldError, UserError
from proxima.data.random import ANSWER_CHECK, sample_without_replacement
from proxima.reward import REWARDS
from proxima.reward.runner import RewardRunner
from proxima.task.protocol import Rows

SHOWN = 5  # unreadable answers in a message


@dataclass(frozen=True, kw_only=True)
class ReferenceAnswers:
    """Rows whose answers a reward will read: the first `count` of `rows`; `name` is their field in the config."""

    name: str
    rows: Rows
    count: int


def validate_answers(
    rewards: RewardRunner, sets: Sequence[ReferenceAnswers], *, limit: int, most_unreadable: float, seed: int
) -> list[str]:
    """Check the rewards and the answers that they will read; returns a warning for each set with unreadable answers.

    Their rows are not skipped, so that the rows that a run consumes depend only on the order of the data.

    Args:
        limit: rows of a set whose answers are read, drawn by the seed; 0: all.
        most_unreadable: the share of unreadable ones above which a set is refused.

    Raises:
        UserError: a reward is not ready, a reward function asks for a column that a row does not have, or more than
            `most_unreadable` of the answers of a set can't be read.
    """
    for answers in sets:
        require_columns(rewards.rewards, answers, limit, seed)
    rewards.check()
    if not rewards.comparing:
        return []
    return [note for answers in sets for note in _notes(answers, rewards, limit, most_unreadable, seed)]


def require_columns(rewards: Sequence[Any], answers: ReferenceAnswers, limit: int, seed: int) -> None:
    """Check that reward functions can be called with the rows; `limit` as in `validate_answers`.

    Raises:
        FieldError: a function has a parameter that is not a column of a row; the message names the nearest column.
    """
    functions = [(number, reward) for number, reward in enumerate(rewards) if REWARDS.holds(reward, "function")]
    seen = set[tuple[int, tuple[str, ...]]]()
    for row in _checked(answers, limit, seed) if functions else ():
        for number, reward in functions:
            columns = tuple(reward.call.columns(answers.rows[row]))
            if (number, columns) not in seen:
                seen.add((number, columns))
                if problem := reward.call.problem(columns):
                    reason, remedy = problem
                    place = f"names a function that {reason} of {answers.name}, row {row}"
                    raise FieldError(f"reward.{number}.path", reward.path, place, remedy=remedy)


def _checked(answers: ReferenceAnswers, limit: int, seed: int) -> Sequence[int]:
    """The numbers of the rows to check."""
    if limit and answers.count > limit:
        return list(map(int, sample_without_replacement(answers.count, limit, ANSWER_CHECK, seed)))
    return range(answers.count)


def _notes(answers: ReferenceAnswers, rewards: RewardRunner, limit: int, share: float, seed: int) -> list[str]:
    numbers = _checked(answers, limit, seed)
    read = [answers.rows[number].answer for number in numbers]
    reasons = zip(numbers, read, rewards.unreadable(read), strict=True)
    looked, unread = len(numbers), [(row, answer, why) for row, answer, why in reasons if why is not None]
    if not unread:
        return []
    if len(unread) == looked and all(answer is None for _, answer, _ in unread):
        compares = " and ".join(rewards.comparing)
        task = answers.name if answers.name.endswith("task") else "task"
        remedy = f"set {task}.answer=COLUMN, or choose a reward that needs none (`proxima list reward`)"
        raise UserError(f"{answers.name}: no row has an answer, and the reward {compares} needs one", remedy=remedy)
    of = f"{looked:,}" if looked == answers.count else f"{looked:,} checked, of {answers.count:,},"
    quoted = "; ".join(f"row {row} {_quoted(answer)} ({why})" for row, answer, why in unread[:SHOWN])
    more = f"; and {len(unread) - SHOWN:,} more" if len(unread) > SHOWN else ""
    facts = f"{answers.name}: {len(unread):,} of {of} answers can't be read: {quoted}{more}"
    if len(unread) > share * looked:
        remedy = "repair or remove these rows, use a reward that reads them, or raise data.max_unreadable"
        raise FieldError("data.max_unreadable", share, f"is exceeded: {facts}", remedy=remedy)
    fate = "these rows are generated like the others, and their completions have no score, unless the reason names one"
    return [f"{facts}; {fate}"]


def _quoted(answer: Any) -> str:
    """An answer in one printable line."""
    text = json.dumps(answer, ensure_ascii=True, default=repr)
    return text if len(text) <= 60 else f"{text[:60]}…"
