"""Calls rewards at once, in threads, or in worker processes. Failures of a reward become failed scores."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from proxima.data import FieldError
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.model.compute_thread import ComputeThread
from proxima.process.worker import JobResult
from proxima.reward.base import (
    Job,
    PooledReward,
    T,
    WeightedReward,
    attempted,
    best_score,
    first_reason,
    unscored,
    validated,
)
from proxima.reward.workers.pool import WorkerPool

TEXT_MEMORY_MB = 1024  # of a worker that parses text written by a model
MOST_HUNG = 100  # abandoned threads; from then on, calls fail at once until one of these returns


class RewardCalls:
    """Calls a reward in the event loop or the compute thread; `ThreadCalls` and `WorkerCalls` are the other ways.

    Args:
        compute: the thread that makes the calls; None: they are made at once, one per completion.
    """

    def __init__(self, reward: WeightedReward, compute: ComputeThread | None = None) -> None:
        self.reward = reward
        self.compute = compute

    def unreadable(self, answers: Sequence[object]) -> list[str | None]:
        """For each answer, the reason why the reward can't score a row with it, or None; blocks."""
        return [self.reward.unreadable(answer) for answer in answers]

    async def group(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """The scores of the completions of a prompt."""
        if self.compute is not None:
            return await self.compute.run(own_scores, self.reward, prompt, completions)
        scores = []
        for completion in completions:
            scores += own_scores(self.reward, prompt, [completion])
        return scores

    async def batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        """The scores of a whole batch; a failed call fails every completion."""
        raise NotImplementedError


def own_scores(reward: WeightedReward, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
    """The scores that the reward returns, with failures as failed scores."""
    scores = attempted(lambda: list(reward.score(prompt, completions)))
    if not isinstance(scores, Score) and len(scores) != len(completions):
        scores = Score.failed(f"ValueError: returned {len(scores)} scores for {len(completions)} completions")
    return [checked_score(score) for score in of_each(scores, completions)]


def of_each(scores: list[Score] | Score, completions: Sequence[object]) -> list[Score]:
    """Convert a failed call to a failed score for each completion."""
    if isinstance(scores, Score):
        return [scores] * len(completions)
    return scores


def checked_score(score: object) -> Score:
    """The score, or a failed one if it is not valid."""
    if isinstance(score, Score) and not score.valid and score.error:
        return score  # it has its own reason
    return attempted(partial(validated, score))


def of_groups(scores: list[list[Score]] | Score, groups: Sequence[Group]) -> list[list[Score]]:
    """Convert a failed call to a failed score for each completion of its groups."""
    if isinstance(scores, Score):
        return [[scores] * len(group.scores) for group in groups]
    return scores


class ThreadCalls(RewardCalls):
    """Makes each call of a reward in its own daemon thread, in order of arrival; a hung call keeps its thread, but not
    its slot.

    Args:
        threads: simultaneous calls from one event loop.
        timeout: seconds of a call, without its time in the queue, times the number of groups for a whole batch; the
            reward's `call_timeout` takes precedence.
    """

    def __init__(self, reward: WeightedReward, threads: int, timeout: float) -> None:
        super().__init__(reward)
        self.timeout = timeout
        self._threads = threads
        self._hung = 0
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._lock = threading.Lock()

    async def group(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        size = self.reward.completions_per_call or max(1, len(completions))
        calls = [completions[start : start + size] for start in range(0, len(completions), size)]
        waiting = (self._run(partial(own_scores, self.reward, prompt, call), self.timeout) for call in calls)
        results = await asyncio.gather(*waiting)
        scores = []
        for result, call in zip(results, calls, strict=True):
            scores += of_each(result, call)
        return scores

    async def batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        call = partial(_batch_scores, self.reward, groups)
        return of_groups(await self._run(call, self.timeout * len(groups)), groups)

    async def _run(self, function: Callable[[], T], timeout: float) -> T | Score:
        """The result of a function, or a failed score if it takes too long, too many earlier calls still hang, or no
        thread can be started."""
        seconds = self.reward.call_timeout or timeout
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._threads))
        async with slots:
            if self._hung >= MOST_HUNG:  # a scorer that always hangs must not exhaust the machine's threads
                return Score.failed(f"not called: {self._hung} earlier calls still hang")
            ended: Future[T] = Future()
            thread = threading.Thread(target=self._call, args=(function, ended), name="reward-thread", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # calls that hang have used up the machine's threads
                return Score.failed(str(error))
            try:
                return await asyncio.wait_for(asyncio.wrap_future(ended), seconds)
            except BaseException as error:
                with self._lock:
                    self._hung += ended.cancel()  # no effect if the function itself raised
                if isinstance(error, TimeoutError):
                    return Score.failed(f"timed out after {seconds:g} s")
                raise

    def _call(self, function: Callable[[], T], ended: "Future[T]") -> None:
        try:
            tell = partial(ended.set_result, function())
        except BaseException as error:
            tell = partial(ended.set_exception, error)
        with self._lock:
            if ended.cancelled():
                self._hung -= 1
            else:
                tell()


def _batch_scores(reward: WeightedReward, groups: Sequence[Group]) -> list[list[Score]] | Score:
    """The scores of a batch, or a failed score for the whole call."""
    lists = attempted(lambda: [list(scores) for scores in reward.score_batch(groups)])
    if isinstance(lists, Score):
        return lists
    if [len(scores) for scores in lists] != [len(group.scores) for group in groups]:
        returned = f"{len(lists)} lists with {sum(map(len, lists))} scores"
        expected = f"{len(groups)} lists with one score for each completion"
        return Score.failed(f"ValueError: returned {returned}, expected {expected}")
    return [[checked_score(score) for score in scores] for scores in lists]


class WorkerCalls(RewardCalls):
    """Calls a reward in the workers of a pool; `timeout` is in seconds per group of a batch."""

    reward: PooledReward

    def __init__(self, reward: WeightedReward, pool: WorkerPool, timeout: float) -> None:
        assert isinstance(reward, PooledReward)
        super().__init__(reward)
        self.pool = pool
        self.timeout = timeout

    def unreadable(self, answers: Sequence[Any]) -> list[str | None]:
        checks = [self._answer_jobs(answer) for answer in answers]
        jobs = [check for of_answer in checks for check in of_answer if isinstance(check, Job)]
        results = iter(self.pool.run_now(jobs))
        reasons = []
        for of_answer in checks:
            whys = [_why(next(results)) if isinstance(check, Job) else check for check in of_answer]
            reasons.append(first_reason(whys))
        return reasons

    def _answer_jobs(self, answer: object) -> list[Job | str | None]:
        """The checks of an answer: for each of several right answers, a job or its result."""
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
        jobs: list[Job | Score] = []
        for completion in completions:
            jobs += [attempted(partial(reward.job, row, completion)) for row in rows]
        # Groups often hold the same answer several times. Equal texts get equal scores; a user's function may not.
        keys: list[str | int] = list(range(len(jobs)))
        if reward.where == "text":
            keys = [_key(job, i) for i, job in enumerate(jobs)]
        distinct = {key: job for key, job in zip(keys, jobs, strict=True) if isinstance(job, Job)}
        results = dict(zip(distinct, await self.pool.run(list(distinct.values())), strict=True))
        scores = []
        for i, (key, job) in enumerate(zip(keys, jobs, strict=True)):
            if isinstance(job, Job):
                row = rows[i % len(rows)]
                job = _parsed(results[key], partial(reward.parse_result, row))
            scores.append(job)
        return [best_score(scores[first : first + len(rows)]) for first in range(0, len(scores), len(rows))]

    async def batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        job = replace(self.reward.batch_job(groups), seconds=self.timeout * len(groups))
        (result,) = await self.pool.run([job])
        return of_groups(_parsed(result, partial(self.reward.parse_batch_result, groups)), groups)


def make_pools(
    rewards: Sequence[WeightedReward], workers: int, timeout: float, memory_mb: int, pool: type[WorkerPool] | None
) -> dict[str, WorkerPool]:
    """The pools by kind of worker; for the arguments see `RewardRunner`."""
    kinds: dict[str, list[PooledReward]] = {}
    for reward in rewards:
        if isinstance(reward, PooledReward):
            kinds.setdefault(reward.pool, []).append(reward)
        elif reward.where in ("text", "function"):
            reason = f"has where={reward.where!r} and does not derive from PooledReward"
            raise FieldError("reward", reward.label, reason, remedy="derive from it, or leave `where` out for a thread")
    pools = {}
    for name, members in sorted(kinds.items()):
        setup = [reward.setup_job() for reward in members]
        pools[name] = (pool or WorkerPool)(
            workers,
            timeout=timeout,
            warm_ups=sorted({reward.warm_up for reward in members if reward.warm_up}),
            setup=[job for job in setup if job],
            restricted=name == "text",
            memory_mb=TEXT_MEMORY_MB if name == "text" else memory_mb,
            sandbox=shared_sandbox(members, workers * memory_mb),
            code_servers=_code_servers(members),
        )
    return pools


def _code_servers(rewards: Sequence[PooledReward]) -> dict[str, int]:
    """The servers of code that any of the rewards needs, each with the largest memory that one asks for."""
    largest: dict[str, int] = {}
    for reward in rewards:
        for kind, memory_mb in reward.code_servers.items():
            largest[kind] = max(memory_mb, largest.get(kind, 0))
    return dict(sorted(largest.items()))


def shared_sandbox(rewards: Sequence[PooledReward], memory_mb: int) -> Any:
    """The sandbox of the workers of a pool, in which the files of all its rewards are readable; None: no sandbox.

    Args:
        memory_mb: MiB that the workers may need in addition to the sandbox's own; 0: unlimited.
    """
    sandboxes = [reward.workers_sandbox for reward in rewards]
    boxes = [box for box in sandboxes if box is not None]
    if not boxes:
        return None
    readable = tuple(dict.fromkeys(path for box in boxes for path in box.readable))
    if memory_mb:
        memory_mb += boxes[0].memory_mb
    return replace(boxes[0], readable=readable, memory_mb=memory_mb)


def _why(checked: JobResult) -> str | None:
    """The reason why a worker can't read an answer, or why it did not try."""
    if checked.value is None:
        return checked.error
    why: str | None = checked.value["why"]
    return why


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
