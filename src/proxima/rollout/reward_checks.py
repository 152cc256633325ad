"""Checks of the rewards before the weights are loaded.

validate_answers   checks that the rewards are ready, that the rows have the columns they need, and that the rewards
                   can read the reference answers: generation for a row whose answer none can read is wasted
try_rewards        checks that the rewards score at all: one that raises on every completion would end the run only
                   after loading the weights, an evaluation and some steps
"""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from proxima.data import FieldError, UserError
from proxima.data.flow import Completion, Group, Prompt, score_errors, without_score
from proxima.data.random import ANSWER_CHECK, sample_without_replacement
from proxima.reward import REWARDS
from proxima.reward.base import as_reward
from proxima.reward.runner import RewardRunner
from proxima.system.jsonl import utf8
from proxima.task.protocol import Rows
from proxima.task.template import as_text

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
    """Check the rewards and the answers that they will read; returns their notes, and a warning for each set with
    unreadable answers.

    Their rows are not skipped, so that the rows that a run consumes depend only on the order of the data.

    Args:
        limit: rows of a set whose answers are read, drawn by the seed; 0: all.
        most_unreadable: the share of unreadable ones above which a set is refused.

    Raises:
        UserError: a reward is not ready, a reward function needs a column that a row does not have, or more than
            `most_unreadable` of the answers of a set can't be read.
    """
    for answers in sets:
        require_columns(rewards.rewards, answers, limit, seed)
    rewards.check()
    unread: list[str] = []
    if rewards.comparing:
        for answers in sets:
            unread += _notes(answers, rewards, limit, most_unreadable, seed)
    return [*rewards.notes(), *unread]


def require_columns(rewards: Sequence[Any], answers: ReferenceAnswers, limit: int, seed: int) -> None:
    """Check that reward functions can be called with the rows; `limit` as in `validate_answers`.

    Raises:
        FieldError: a function has a parameter that is not a column of a row; the message names the nearest column.
    """
    functions = [(number, reward) for number, reward in enumerate(rewards) if REWARDS.holds(reward, "function")]
    if not functions:
        return
    seen = set[tuple[int, tuple[str, ...]]]()
    for row in _checked(answers, limit, seed):
        for number, reward in functions:
            columns = tuple(reward.call.columns(answers.rows[row]))
            if (number, columns) in seen:
                continue
            seen.add((number, columns))
            problem = reward.call.problem(columns)
            if problem:
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
    looked = len(numbers)
    unread = [(row, answer, why) for row, answer, why in reasons if why is not None]
    if not unread:
        return []
    if len(unread) == looked and all(answer is None for _, answer, _ in unread):
        compares = " and ".join(rewards.comparing)
        task = answers.name if answers.name.endswith("task") else "task"
        remedy = f"set {task}.answer=COLUMN, or choose a reward that needs none (`proxima list reward`)"
        raise UserError(f"{answers.name}: no row has an answer, and the reward {compares} needs one", remedy=remedy)
    if looked == answers.count:
        of = f"{looked:,}"
    else:
        of = f"{looked:,} checked, of {answers.count:,},"
    quoted = [f"row {row} {_quoted(answer)} ({why})" for row, answer, why in unread[:SHOWN]]
    if len(unread) > SHOWN:
        quoted.append(f"and {len(unread) - SHOWN:,} more")
    facts = f"{answers.name}: {len(unread):,} of {of} answers can't be read: {'; '.join(quoted)}"
    if len(unread) > share * looked:
        remedy = "repair or remove these rows, use a reward that reads them, or raise data.max_unreadable"
        raise FieldError("data.max_unreadable", share, f"is exceeded: {facts}", remedy=remedy)
    fate = "these rows are generated like the others, but their completions get no score unless the reason names one"
    return [f"{facts}; {fate}"]


def _quoted(answer: object) -> str:
    """An answer in one printable line."""
    text = json.dumps(answer, ensure_ascii=True, default=repr)
    return text if len(text) <= 60 else f"{text[:60]}…"


PROMPTS = 4  # to try: the first one, and the others only if it got no score
PLAIN = "I think that the answer is 7."
TRIAL_UID = 1 << 42  # the first uid of trial prompts, used by no draw and no record of the run


def try_rewards(
    specs: Sequence[Any],
    prompts: Sequence[Prompt],
    tokenizer: Any,
    make: Callable[[Sequence[Any]], RewardRunner],
    *,
    refuses: bool,
) -> list[str]:
    """Score two synthetic completions of a prompt, its answer and a plain sentence; if both fail, try more prompts.
    `make` makes the runner of those rewards that are tried.

    Rewards that run a model are left out, because their weights are not loaded (their `check` has passed), and so are
    rewards that need an episode.

    Returns: a warning if no completion has a score.

    Raises:
        FieldError: the same, if it `refuses` them; the message quotes the rewards' errors.
    """
    tried = [s for s in specs if as_reward(s).where != "compute" and not REWARDS.holds(s, "environment")]
    if len(tried) < len(specs):  # whole-batch rewards would miss their scores
        tried = [spec for spec in tried if not as_reward(spec).whole_batch]
    if not prompts or all(as_reward(spec).weight == 0 for spec in tried):
        return []
    with closing(make(tried)) as rewards:
        groups = _in_thread(_tried(rewards, prompts[:PROMPTS], tokenizer))
    if without_score(groups) < len(groups):
        return []
    count = sum(len(group.scores) for group in groups)
    text = groups[0].completions[0].text
    facts = f"none of {count} synthetic completions such as {text!r:.60} has a score ({score_errors(groups)})"
    if not refuses:
        return [f"reward: {facts}"]
    score = "fix the reward (proxima reward score tries it)"
    remedy = f"{score}, or set runtime.reward_trial=warn if it is right to refuse such texts"
    raise FieldError("reward", ", ".join(rewards.labels), f"fails: {facts}", remedy=remedy)


def _in_thread(work: Coroutine[Any, Any, list[Group]]) -> list[Group]:
    """The result of `work`, run in its own thread because this one may have a running event loop. It is a daemon
    thread, so that Ctrl-C does not wait for a reward that hangs."""
    ended: Future[list[Group]] = Future()

    def run() -> None:
        try:
            ended.set_result(asyncio.run(work))
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="reward-trial", daemon=True).start()
    return ended.result()


async def _tried(rewards: RewardRunner, prompts: Sequence[Prompt], tokenizer: Any) -> list[Group]:
    """Scored synthetic completions of the first prompt and, if none of them has a score, of the others, under uids that
    the run does not use."""
    groups = list[Group]()
    for some in (prompts[:1], prompts[1:]):
        unjudged = []
        for number, prompt in enumerate(some, len(groups)):
            tried = replace(prompt, uid=TRIAL_UID + number)
            texts = (_right_answer(prompt), PLAIN)
            completions = tuple(_completion(tried, i, text, tokenizer) for i, text in enumerate(texts))
            scores = tuple(await rewards.score(tried, completions))
            unjudged.append(Group(prompt=tried, completions=completions, scores=scores))
        groups += await rewards.score_batch(unjudged)
        if without_score(groups) < len(groups):
            break
    return groups


def _right_answer(prompt: Prompt) -> str:
    """The first answer of a row, as text; any number if it has none."""
    right = prompt.answer
    if isinstance(right, list) and right:
        right = right[0]
    return "7" if right is None else as_text(right)


def _completion(prompt: Prompt, sample: int, text: str, tokenizer: Any) -> Completion:
    text = utf8(text)
    tokens = tokenizer(text, add_special_tokens=False).input_ids or [tokenizer.eos_token_id]
    return Completion.of_text(prompt.uid, sample, prompt.begun + text, tokens)
