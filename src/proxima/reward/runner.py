"""Runs a list of rewards over a prompt's completions and adds them up."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from proxima.data import Completion, Prompt, Score, require
from proxima.reward.base import Job, PooledReward, checked
from proxima.reward.function import Function
from proxima.reward.pool import Answer, WorkerPool
from proxima.reward.protocol import Reward
from proxima.reward.threads import DaemonThreads

T = TypeVar("T")


class RewardRunner:
    """Scores completions by a weighted list of rewards; a failure costs the one completion it happened to.

        value = sum over rewards of weight * part      correct: from the first reward, in the order given, that knows

    Args:
        rewards: the specs, at least one; `weight` and `name` are read where there are any (else 1 and the class name).
        timeout: seconds a reward may take for one completion; > 0.
        workers: worker processes for each kind of worker in use, and threads for rewards that run in threads; >= 1.
        memory_mb: MiB that a worker which parses a model's text may take.

    Raises:
        ValueError: no rewards, or two of the same name.

    A failure is an exception, a time-out, a value that is not finite, or a worker that died: the score is then `valid=False` with
    `error="<name>: <why>"`, and `parts` holds what the other rewards said. A reward of weight 0 fails without consequence.
    """

    def __init__(self, rewards: Sequence[Reward], timeout: float = 10.0, workers: int = 1, memory_mb: int = 1024) -> None:
        require(len(rewards) >= 1, "reward", list(rewards), "must hold at least one reward")
        require(timeout > 0, "timeout", timeout, "must be > 0 seconds")
        require(workers >= 1, "workers", workers, "must be >= 1")
        self.rewards, self.timeout = tuple(rewards), timeout
        self.labels = tuple(_label(reward) for reward in rewards)
        for label in self.labels:
            require(self.labels.count(label) == 1, "reward", label, "is the name of two rewards; give one of them another `name`")
        pooled = [reward for reward in self.rewards if isinstance(reward, PooledReward)]
        text = {reward.kind for reward in pooled if reward.where == "text"}
        functions = [reward.absolute for reward in pooled if isinstance(reward, Function)]
        warm = sorted(text & {"math", "reasoning_gym"})
        setup = [Job(grader="prepare", arguments={"path": path}) for path in functions]
        self._pools: dict[str, WorkerPool] = {}
        if text:
            self._pools["text"] = WorkerPool(workers, timeout=timeout, warm=warm, memory_mb=memory_mb)
        if functions:
            self._pools["function"] = WorkerPool(workers, timeout=timeout, warm=["function"], setup=setup, restricted=False)
        self._threads = DaemonThreads(workers)

    def start(self) -> None:
        """Start the worker processes ahead of the first `score`, beside whatever else begins; returns at once. May be left out."""
        for pool in self._pools.values():
            pool.start()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """One score for each completion, in the same order."""
        columns = await asyncio.gather(*(self._column(reward, prompt, completions) for reward in self.rewards))
        return [self._combine([column[i] for column in columns]) for i in range(len(completions))]

    def close(self) -> None:
        """End the workers. A reward still hanging in a thread is left behind; it can't keep the process alive."""
        for pool in self._pools.values():
            pool.close()
        self._threads.close()

    def _combine(self, scores: Sequence[Score]) -> Score:
        parts: dict[str, float] = {}
        for label, score in zip(self.labels, scores, strict=True):
            if score.valid:
                parts[label] = score.value
                parts.update({f"{label}/{key}": value for key, value in score.parts.items()})
        correct = next((score.correct for score in scores if score.correct is not None), None)
        weighted = [(_weight(reward), label, score) for reward, label, score in zip(self.rewards, self.labels, scores, strict=True)]
        errors = [f"{label}: {score.error}" for weight, label, score in weighted if weight != 0 and not score.valid]
        if errors:  # it may quote what the model wrote, and is printed
            shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in "; ".join(errors))
            return replace(Score.failed(shown), parts=parts, correct=correct)
        value = sum(weight * score.value for weight, _, score in weighted if weight != 0)
        if not math.isfinite(value):
            return replace(Score.failed(f"the weighted sum of the rewards is {value}"), parts=parts, correct=correct)
        return Score(value=value, parts=parts, correct=correct)

    async def _column(self, reward: Reward, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """One reward's scores of all completions, failures as failed scores."""
        if isinstance(reward, PooledReward):
            return await self._in_workers(reward, prompt, completions)
        if getattr(reward, "whole_group", False):
            return await self._in_thread(reward, prompt, completions)
        if getattr(reward, "where", "thread") == "inline":
            return [score for completion in completions for score in _scores(reward, prompt, [completion])]
        columns = await asyncio.gather(*(self._in_thread(reward, prompt, [completion]) for completion in completions))
        return [score for column in columns for score in column]

    async def _in_workers(self, reward: PooledReward, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        asked = [_attempt(partial(reward.job, prompt, completion)) for completion in completions]
        answers = iter(await self._pools[reward.where].run([job for job in asked if isinstance(job, Job)]))
        return [entry if isinstance(entry, Score) else _read(reward, prompt, next(answers)) for entry in asked]

    async def _in_thread(self, reward: Reward, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        try:
            scores: list[Score] = await self._threads.run(partial(_scores, reward, prompt, completions), self.timeout)
            return scores
        except TimeoutError:
            return [Score.failed(f"timed out after {self.timeout:g} s")] * len(completions)


def _label(reward: Reward) -> str:
    label = getattr(reward, "label", None) or getattr(reward, "name", None)
    return str(label or type(reward).__name__.lower())


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
    """The reward's own scores, failures as failed scores; a failure of the call is a failure of every completion in it."""
    scores = _attempt(lambda: list(reward.score(prompt, completions)))
    if isinstance(scores, Score):
        return [scores] * len(completions)
    if len(scores) != len(completions):
        return [Score.failed(f"ValueError: returned {len(scores)} scores for {len(completions)} completions")] * len(completions)
    return [_attempt(partial(checked, score)) for score in scores]


def _read(reward: PooledReward, prompt: Prompt, answer: Answer) -> Score:
    if answer.result is None:
        return Score.failed(answer.error or "no answer")
    result = answer.result
    return _attempt(lambda: reward.read(prompt, result))
