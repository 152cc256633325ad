"""Before the weights are loaded: can the rewards be reached, and can they read the answers that they are to compare
with?

A row whose answer no reward can read costs generation and gives no score, only invalid ones; a scorer that isn't there
gives none at all.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxima.data import FieldError
from proxima.data.random import ANSWER_CHECK, sample_without_replacement
from proxima.reward.runner import RewardRunner
from proxima.task.protocol import Rows

if TYPE_CHECKING:
    from proxima.config.schema import EvaluateConfig, RunConfig

SHOWN = 5  # unreadable answers quoted


@dataclass(frozen=True, kw_only=True)
class ReferenceAnswers:
    """Rows whose answers will be compared with.

    Args:
        name: the field of the config that they come from, as in `task`.
        rows: the data.
        count: how many of them, from the first on, the run will use.
    """

    name: str
    rows: Rows
    count: int


@dataclass(frozen=True, kw_only=True)
class UnreadableAnswer:
    """A row whose answer a reward can't read: its number, the answer, and why, after the reward's name."""

    row: int
    answer: Any
    why: str


def validate_answers(config: "RunConfig | EvaluateConfig", sets: Sequence[ReferenceAnswers]) -> list[str]:
    """Ask the rewards whether they are ready, and read the answers; what a person should know, a line for each set that
    has something.

    Rows with such answers are not left out: what the run consumes is a function of the data's order alone.

    Raises:
        ValueError: a reward isn't ready, or more than `data.max_unreadable` of a set's answers can't be read.
    """
    rewards = RewardRunner(config.reward, timeout=config.runtime.reward_timeout, workers=os.cpu_count() or 1)
    try:
        rewards.check()
        if not rewards.needs_answers:
            return []
        return [note for answers in sets for note in _notes(config, answers, rewards)]
    finally:
        rewards.close()


def unreadable(
    answers: ReferenceAnswers, rewards: RewardRunner, limit: int, seed: int
) -> tuple[int, list[UnreadableAnswer]]:
    """How many rows were looked at, and those of them whose answer can't be read, in the order of the rows.

    Args:
        limit: rows to look at; with more in the set, so many are drawn by the seed. 0: all.
    """
    numbers: Sequence[int] = range(answers.count)
    if limit and answers.count > limit:
        numbers = sample_without_replacement(answers.count, limit, ANSWER_CHECK, seed).tolist()
    read = [answers.rows[number].answer for number in numbers]
    reasons = zip(numbers, read, rewards.unreadable(read), strict=True)
    return len(numbers), [
        UnreadableAnswer(row=number, answer=answer, why=why) for number, answer, why in reasons if why is not None
    ]


def _notes(config: "RunConfig | EvaluateConfig", answers: ReferenceAnswers, rewards: RewardRunner) -> list[str]:
    looked, found = unreadable(answers, rewards, config.data.check_answers, config.seed)
    if not found:
        return []
    of = f"{looked:,}" if looked == answers.count else f"{looked:,} looked at, of {answers.count:,},"
    quoted = "; ".join(f"row {one.row} {_quoted(one.answer)} ({one.why})" for one in found[:SHOWN])
    more = f"; and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
    facts = f"{answers.name}: {len(found):,} of {of} answers can't be read: {quoted}{more}"
    share = config.data.max_unreadable
    if len(found) > share * looked:
        remedy = "repair or remove these rows, take a reward that reads them, or raise data.max_unreadable"
        raise FieldError("data.max_unreadable", share, f"is exceeded: {facts}", remedy=remedy)
    return [f"{facts}; these rows are generated like the others, and none of their completions will have a score"]


def _quoted(answer: Any) -> str:
    """An answer in one printable line."""
    text = json.dumps(answer, ensure_ascii=True, default=repr)
    return text if len(text) <= 60 else f"{text[:60]}…"
