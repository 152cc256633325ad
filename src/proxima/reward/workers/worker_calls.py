"""Rewards in worker processes: the pools that they share, and how each is called."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from proxima.data import FieldError
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.process.worker import JobResult
from proxima.reward.base import T, WeightedReward, attempted, unscored
from proxima.reward.calls import RewardCalls, of_each, of_groups
from proxima.reward.pooled import Job, PooledReward
from proxima.reward.right_answers import best_score, first_reason
from proxima.reward.workers.pool import WorkerPool

TEXT_MEMORY_MB = 1024  # of a worker that parses text written by a model


def make_pools(
    rewards: Sequence[WeightedReward], workers: int, timeout: float, memory_mb: int, pool: type[WorkerPool] | None
) -> dict[str, WorkerPool]:
    """The pools by kind of worker; for the arguments see `RewardRunner`."""
    kinds: dict[str, list[PooledReward]] = {}
    for reward in rewards:
        if isinstance(reward, PooledReward):
            kinds.setdefault(reward.where, []).append(reward)
        elif reward.where in ("text", "function"):
            reason = f"has where={reward.where!r} and does not derive from PooledReward"
            raise FieldError("reward", reward.label, reason, remedy="derive from it, or leave `where` out for a thread")
    return {
        where: (pool or WorkerPool)(
            workers,
            timeout=timeout,
            warm_ups=sorted({reward.warm_up for reward in members if reward.warm_up}),
            setup=[job for reward in members if (job := reward.setup_job())],
            restricted=where == "text",
            memory_mb=TEXT_MEMORY_MB if where == "text" else memory_mb,
        )
        for where, members in sorted(kinds.items())
    }


class WorkerCalls(RewardCalls):
    """Calls a reward in the workers of a pool; `timeout` is in seconds for one completion."""

    reward: PooledReward

    def __init__(self, reward: WeightedReward, pool: WorkerPool, timeout: float) -> None:
        assert isinstance(reward, PooledReward)
        super().__init__(reward)
        self.pool, self.timeout = pool, timeout

    def unreadable(self, answers: Sequence[Any]) -> list[str | None]:
        jobs = [self._answer_jobs(answer) for answer in answers]
        results = self.pool.run_now([job for several in jobs for job in several if isinstance(job, Job)])
        whys = ((r.error if r.value is None else r.value["why"]) for r in results)
        return [first_reason([next(whys) if isinstance(job, Job) else job for job in several]) for several in jobs]

    def _answer_jobs(self, answer: Any) -> list[Job | str | None]:
        """What tells whether the answer can be read: for each of several right answers, a job or its result."""
        try:
            return [self.reward.answer_job(each) for each in self.reward.right_answers(answer)]
        except ValueError as error:
            return [str(error)]

    async def group(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        reward = self.reward
        if reward.completions_per_call != 1:
            return (await self.batch([unscored(prompt, completions)]))[0]
        rows = attempted(partial(reward.rows, prompt))
        if isinstance(rows, Score):
            return of_each(rows, completions)
        jobs = [attempted(partial(reward.job, row, completion)) for completion in completions for row in rows]
        # Groups often hold the same answer several times. Equal texts get equal scores; a user's function may not.
        keyed = [(_key(job, i) if reward.where == "text" else i, job) for i, job in enumerate(jobs)]
        distinct = {key: job for key, job in keyed if isinstance(job, Job)}
        results = dict(zip(distinct, await self.pool.run(list(distinct.values())), strict=True))
        scores = [
            job if isinstance(job, Score) else _parsed(results[key], partial(reward.parse_result, rows[i % len(rows)]))
            for i, (key, job) in enumerate(keyed)
        ]
        return [best_score(scores[first : first + len(rows)]) for first in range(0, len(scores), len(rows))]

    async def batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        job = replace(self.reward.batch_job(groups), seconds=self.timeout * len(groups))
        (result,) = await self.pool.run([job])
        return of_groups(_parsed(result, partial(self.reward.parse_batch_result, groups)), groups)


def _key(job: Job | Score, otherwise: int) -> str | int:
    """A key that is equal for jobs with equal results."""
    if isinstance(job, Score):
        return otherwise
    try:
        return json.dumps([job.grader, job.arguments])
    except (TypeError, ValueError):
        return otherwise  # the pool reports the reason


def _parsed(result: JobResult, parse: Callable[[Any], T]) -> T | Score:
    if result.value is None:
        return Score.failed(result.error or "no answer")
    return attempted(partial(parse, result.value))
