"""Runs a list of rewards over a prompt's completions and adds them up."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from proxima.data import Completion, Group, Prompt, Score, UserError, require
from proxima.reward.base import Job, PooledReward, label_of, validated
from proxima.reward.function import UserFunction
from proxima.reward.protocol import Reward
from proxima.reward.workers.pool import Answer, WorkerPool
from proxima.reward.workers.threads import DaemonThreads

T = TypeVar("T")


class RewardRunner:
    """Scores completions by a weighted list of rewards; a failure costs the one completion it happened to.

        value = sum over rewards of weight * part      correct: from the first reward, in the order given, that knows

    `score` takes a group as soon as it is complete. Rewards that look at the whole batch are left out there; once a
    batch of generation, `score_batch` adds what they say to the groups that the others have scored.

    Args:
        rewards: the specs, at least one; `weight` and `name` are read where there are any (else 1 and the class name).
        timeout: seconds a reward may take for one completion; > 0.
        workers: worker processes for each kind of worker in use, and threads for rewards that run in threads; >= 1.
        memory_mb: MiB that a worker which parses a model's text may take.

    Raises:
        ValueError: no rewards, or two of the same name.

    A failure is an exception, a time-out, a value that is not finite, or a worker that died: the score is then
    `valid=False` with `error="<name>: <why>"`, and `parts` holds what the other rewards said. A reward of weight 0
    fails without consequence.

    However many completions come at once, no more than `workers` calls of a reward are made at once, or as many as it
    says itself (`concurrency`). A reward of which 100 calls hang is not called until one comes back: its scores are
    invalid at once.
    """

    def __init__(
        self, rewards: Sequence[Reward], timeout: float = 10.0, workers: int = 1, memory_mb: int = 1024
    ) -> None:
        require(len(rewards) >= 1, "reward", list(rewards), "must hold at least one reward")
        require(timeout > 0, "timeout", timeout, "must be > 0 seconds")
        require(workers >= 1, "workers", workers, "must be >= 1")
        self.rewards, self.timeout = tuple(rewards), timeout
        self.labels = tuple(label_of(reward) for reward in rewards)
        for label in self.labels:
            require(
                self.labels.count(label) == 1,
                "reward",
                label,
                "is the name of two rewards; give one of them another `name`",
            )
        pooled = [reward for reward in self.rewards if isinstance(reward, PooledReward)]
        text = {reward.kind for reward in pooled if reward.where == "text"}
        functions = [reward.absolute for reward in pooled if isinstance(reward, UserFunction)]
        warm = sorted(text & {"math", "reasoning_gym"})
        setup = [Job(grader="load", arguments={"path": path}) for path in functions]
        self._pools: dict[str, WorkerPool] = {}
        if text:
            self._pools["text"] = WorkerPool(workers, timeout=timeout, warm=warm, memory_mb=memory_mb)
        if functions:
            self._pools["function"] = WorkerPool(
                workers, timeout=timeout, warm=["function"], setup=setup, restricted=False
            )
        self._threads = [DaemonThreads(getattr(reward, "concurrency", 0) or workers) for reward in self.rewards]

    @property
    def has_batch(self) -> bool:
        """Whether a reward looks at the whole batch, so that `score_batch` has something to add."""
        return any(_of_batch(reward) for reward in self.rewards)

    @property
    def compares(self) -> bool:
        """Whether a reward that counts compares with the row's answer, so that `unreadable` may find something."""
        return any(map(_compares, self.rewards))

    def check(self) -> None:
        """Ask each reward whether what it needs outside this process is there; for before the run.

        Raises:
            ValueError: one line that names the reward, what is missing and what to do. A reward of weight 0 may miss
                what it wants.
        """
        for reward, label in zip(self.rewards, self.labels, strict=True):
            if hasattr(reward, "check") and _weight(reward) != 0:
                try:
                    reward.check()
                except ValueError as problem:
                    raise UserError(f"reward '{label}': {problem}") from None

    def unreadable(self, answers: Sequence[Any]) -> list[str | None]:
        """For each row's answer, why a reward could score nothing in that row, or None; looks at each different answer
        once, and waits.

        Only rewards that count are asked (weight other than 0). What takes a worker is done by all of them side by
        side.
        """
        found: dict[str, str | None] = {}
        keys = [json.dumps(answer, sort_keys=True, default=repr) for answer in answers]
        different = dict(zip(keys, answers, strict=True))
        for reward, label in zip(self.rewards, self.labels, strict=True):
            if not _compares(reward):
                continue
            for key, why in zip(different, self._reasons(reward, list(different.values())), strict=True):
                if why is not None:
                    found.setdefault(key, f"{label}: {why}")
        return [found.get(key) for key in keys]

    def _reasons(self, reward: Any, answers: Sequence[Any]) -> list[str | None]:
        if not isinstance(reward, PooledReward):
            return [reward.unreadable(answer) for answer in answers]
        asked = [reward.reading(answer) for answer in answers]
        answered = iter(self._pools[reward.where].run_now([job for job in asked if isinstance(job, Job)]))
        return [_why(next(answered)) if isinstance(entry, Job) else entry for entry in asked]

    def start(self) -> None:
        """Start the worker processes ahead of the first `score`, beside whatever else begins; returns at once. May be
        left out."""
        for pool in self._pools.values():
            pool.start()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """One score for each completion, in the same order."""
        chosen = [i for i, reward in enumerate(self.rewards) if not _of_batch(reward)]
        columns = await asyncio.gather(*(self._column(i, prompt, completions) for i in chosen))
        start = Score(value=0.0)
        return [
            self._added(start, [(i, column[at]) for i, column in zip(chosen, columns, strict=True)])
            for at in range(len(completions))
        ]

    async def score_batch(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with what the rewards of the whole batch add to each score; the groups themselves where there are
        none.

        What such a reward says is weighted and added like any other part; where it fails, the completion becomes
        invalid. A completion that is invalid already stays so. `correct` is kept where it is known.
        """
        chosen = [i for i, reward in enumerate(self.rewards) if _of_batch(reward)]
        if not chosen or not groups:
            return list(groups)
        columns = await asyncio.gather(*(self._batch_column(i, groups) for i in chosen))
        out = []
        for g, group in enumerate(groups):
            said = [
                [(i, column[g][at]) for i, column in zip(chosen, columns, strict=True)]
                for at in range(len(group.scores))
            ]
            out.append(replace(group, scores=tuple(map(self._added, group.scores, said))))
        return out

    def close(self) -> None:
        """End the workers. A reward still hanging in a thread is left behind; it can't keep the process alive."""
        for pool in self._pools.values():
            pool.close()
        for threads in self._threads:
            threads.close()

    def _added(self, before: Score, said: Sequence[tuple[int, Score]]) -> Score:
        """A score with what more rewards (by number) say of the completion."""
        parts = dict(before.parts)
        errors = [before.error or "no score"] if not before.valid else []
        value, correct = before.value, before.correct
        for i, score in said:
            label, weight = self.labels[i], _weight(self.rewards[i])
            if score.valid:
                parts[label] = score.value
                parts.update({f"{label}/{key}": part for key, part in score.parts.items()})
            if score.valid and weight != 0:
                value += weight * score.value
            elif weight != 0:
                errors.append(f"{label}: {score.error}")
            correct = score.correct if correct is None else correct
        if not errors and not math.isfinite(value):
            errors = [f"the weighted sum of the rewards is {value}"]
        if errors:  # it may quote what the model wrote, and is printed
            shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in "; ".join(errors))
            return replace(Score.failed(shown), parts=parts, correct=correct)
        return Score(value=value, parts=parts, correct=correct)

    async def _column(self, i: int, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """One reward's scores of all completions, failures as failed scores."""
        reward = self.rewards[i]
        if isinstance(reward, PooledReward):
            return await self._in_workers(reward, prompt, completions)
        if getattr(reward, "where", "thread") == "inline" and not getattr(reward, "whole_group", False):
            return [score for completion in completions for score in _scores(reward, prompt, [completion])]
        size = getattr(reward, "per_call", 0 if getattr(reward, "whole_group", False) else 1) or max(
            1, len(completions)
        )
        calls = [completions[start : start + size] for start in range(0, len(completions), size)]
        answers = await asyncio.gather(
            *(self._in_thread(i, partial(_scores, reward, prompt, call), self.timeout) for call in calls)
        )
        columns = [
            [answer] * len(call) if isinstance(answer, Score) else answer
            for answer, call in zip(answers, calls, strict=True)
        ]
        return [score for column in columns for score in column]

    async def _in_workers(self, reward: PooledReward, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        asked = [_attempt(partial(reward.job, prompt, completion)) for completion in completions]
        once: dict[
            Any, Job
        ] = {}  # groups hold the same answer several times; what a text is worth does not depend on the time of day
        keys = [_key(job, i) if reward.where == "text" else i for i, job in enumerate(asked)]
        for key, job in zip(keys, asked, strict=True):
            if isinstance(job, Job):
                once.setdefault(key, job)
        answers = dict(zip(once, await self._pools[reward.where].run(list(once.values())), strict=True))
        return [
            entry if isinstance(entry, Score) else _read(reward, prompt, answers[key])
            for key, entry in zip(keys, asked, strict=True)
        ]

    async def _batch_column(self, i: int, groups: Sequence[Group]) -> list[list[Score]]:
        """One reward's scores of the whole batch; a failure of the call is one of every completion."""
        reward, seconds = self.rewards[i], self.timeout * len(groups)
        found: Any
        if isinstance(reward, PooledReward):
            (answer,) = await self._pools[reward.where].run([replace(reward.batch_job(groups), seconds=seconds)])
            found = Score.failed(answer.error or "no answer") if answer.result is None else answer.result
            if not isinstance(found, Score):
                found = _attempt(partial(reward.read_batch, groups, found))
        else:
            found = await self._in_thread(i, partial(_batch_scores, reward, groups), seconds)
        return [[found] * len(group.scores) for group in groups] if isinstance(found, Score) else found

    async def _in_thread(self, i: int, call: Callable[[], T], timeout: float) -> T | Score:
        """What the call returns, or the failed score that says why it doesn't."""
        seconds = getattr(self.rewards[i], "deadline", 0.0) or timeout
        try:
            answer: T = await self._threads[i].run(call, seconds)
            return answer
        except TimeoutError:
            return Score.failed(f"timed out after {seconds:g} s")
        except RuntimeError as problem:
            return Score.failed(str(problem))


def _why(answer: Answer) -> str | None:
    return answer.error if answer.result is None else answer.result["why"]


def _compares(reward: Reward) -> bool:
    return _weight(reward) != 0 and bool(getattr(reward, "compares", False))


def _of_batch(reward: Reward) -> bool:
    return bool(getattr(reward, "whole_batch", False))


def _key(job: Job | Score, otherwise: int) -> str | int:
    """Equal for jobs that a worker can't tell apart."""
    if isinstance(job, Score):
        return otherwise
    try:
        return json.dumps([job.grader, job.arguments])
    except (TypeError, ValueError):
        return otherwise  # the pool says what is wrong with it


def _weight(reward: Reward) -> float:
    return float(getattr(reward, "weight", 1.0))


def _attempt(call: Callable[[], T]) -> T | Score:
    """What the call returns, or the failed score that says what it raised."""
    try:
        return call()
    except BaseException as problem:  # a scorer's sys.exit() is its own failure, not the run's
        if isinstance(problem, KeyboardInterrupt):
            raise
        return Score.failed(" ".join(f"{type(problem).__name__}: {problem}".split())[:300])


def _scores(reward: Reward, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
    """The reward's own scores, failures as failed scores; a failure of the call is a failure of every completion in
    it."""
    scores = _attempt(lambda: list(reward.score(prompt, completions)))
    if isinstance(scores, Score):
        return [scores] * len(completions)
    if len(scores) != len(completions):
        return [Score.failed(f"ValueError: returned {len(scores)} scores for {len(completions)} completions")] * len(
            completions
        )
    return [_checked(score) for score in scores]


def _checked(score: object) -> Score:
    if isinstance(score, Score) and not score.valid and score.error:
        return score  # failed in its own words
    return _attempt(partial(validated, score))


def _batch_scores(reward: Any, groups: Sequence[Group]) -> list[list[Score]] | Score:
    """The scores of a batch, or the failed score of the whole call."""
    found = _attempt(lambda: [list(row) for row in reward.score_batch(groups)])
    if isinstance(found, Score):
        return found
    if [len(row) for row in found] != [len(group.scores) for group in groups]:
        told = f"{len(found)} lists with {sum(map(len, found))} scores"
        return Score.failed(
            f"ValueError: returned {told}, expected {len(groups)} lists with one score for each completion"
        )
    return [[_checked(score) for score in row] for row in found]


def _read(reward: PooledReward, prompt: Prompt, answer: Answer) -> Score:
    if answer.result is None:
        return Score.failed(answer.error or "no answer")
    result = answer.result
    return _attempt(lambda: reward.read(prompt, result))
