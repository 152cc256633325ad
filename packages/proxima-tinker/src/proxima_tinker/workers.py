"""Threads that serve all models and samplers in turn.

Each of them has a lane, a queue of calls that run one after the other. A free thread takes one call of the lane that
has waited longest: who sends many delays only himself. Every thread computes with the same number of torch threads,
whatever else runs, so that results do not depend on who else is there.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from proxima.model.compute_thread import ComputeThread, Job, perform

T = TypeVar("T")


class Workers(ThreadPoolExecutor):
    """The threads; of each lane at most one call is in their queue.

    Args:
        count: threads, so many calls run at the same time.
        threads: torch threads of each; OpenMP counts them for each thread that computes.

    Attributes: `lock`, of all lanes and of `waiting`, the number of lanes that wait for a thread.
    """

    def __init__(self, count: int, threads: int) -> None:
        torch.set_num_threads(threads)
        super().__init__(count, "worker", torch.set_num_threads, (threads,))
        self.lock = threading.Lock()
        self.waiting = 0


class ComputeLane(ComputeThread):
    """The calls of one model or sampler: a `ComputeThread` whose calls run in the threads of `Workers`."""

    def __init__(self, workers: Workers) -> None:
        super().__init__()
        self.workers = workers
        self.jobs = deque[Job]()  # the first runs or waits for a thread

    def submit(self, call: Callable[..., T], *arguments: Any) -> "Future[T]":
        job: Job = (Future(), call, arguments)
        with self.workers.lock:
            self.jobs.append(job)
            if len(self.jobs) == 1:
                self._queue()
        return job[0]

    def _queue(self) -> None:
        self.workers.waiting += 1
        self.workers.submit(self._perform)

    def _perform(self) -> None:
        with self.workers.lock:
            self.workers.waiting -= 1
        perform(self.jobs[0])
        with self.workers.lock:
            self.jobs.popleft()
            if self.jobs:
                self._queue()

    async def run_parts(self, parts: Generator[None, None, T]) -> T:
        """Return or raise what the generator does; where it yields, others get their turn. If the caller is cancelled,
        the generator is closed in this lane: the tensors that it holds may still be in use there, and freeing them in
        whichever thread collects it can end the process."""
        result: list[T] = []
        try:
            while not result:
                result = await self.run(advanced, parts)
        except BaseException:
            await self.run(parts.close)
            raise
        return result[0]

    @property
    def wanted(self) -> bool:
        return len(self.jobs) > 1 or self.workers.waiting > 0


def advanced(parts: Generator[None, None, T]) -> list[T]:
    """Run the next part; the result if it was the last, else nothing."""
    try:
        next(parts)
    except StopIteration as stop:
        return [stop.value]
    return []
