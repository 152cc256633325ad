"""Threads that serve all models and samplers in turn.

Each of them has a lane, a queue of calls that run one after the other. A free thread takes one call of the lane that
has waited longest: who sends many delays only himself. Every thread computes with the same number of torch threads,
whatever else runs, so that results do not depend on who else is there.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from proxima.model.compute_thread import ComputeThread, Job, perform

T = TypeVar("T")


class Workers:
    """The threads.

    Args:
        count: threads, so many calls run at the same time.
        threads: torch threads of each.
    """

    def __init__(self, count: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._ready: deque[ComputeLane] = deque()  # with a call, none of which is running
        self._wakes = threading.Condition()
        self._closed = False
        names = [f"worker-{number}" for number in range(count)]
        self._threads = [threading.Thread(target=self._work, args=(threads,), name=n, daemon=True) for n in names]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, each after the call that it runs: torch aborts a process that ends during one."""
        with self._wakes:
            self._closed = True
            self._wakes.notify_all()
        for thread in self._threads:
            thread.join()

    def lane(self) -> "ComputeLane":
        return ComputeLane(self)

    def put(self, lane: "ComputeLane", job: Job) -> None:
        with self._wakes:
            lane.jobs.append(job)
            if not lane.running and len(lane.jobs) == 1:
                self._ready.append(lane)
                self._wakes.notify()

    @property
    def wanted(self) -> bool:
        """True if a lane waits for a thread."""
        return bool(self._ready)

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)  # OpenMP counts them for each thread that computes
        while True:
            with self._wakes:
                while not self._ready and not self._closed:
                    self._wakes.wait()
                if self._closed:
                    return
                lane = self._ready.popleft()
                lane.running, job = True, lane.jobs.popleft()
            perform(job)
            del job  # its arguments may be large
            with self._wakes:
                lane.running = False
                if lane.jobs:
                    self._ready.append(lane)
                    self._wakes.notify()


class ComputeLane(ComputeThread):
    """The calls of one model or sampler: a `ComputeThread` whose calls run in the threads of `Workers`."""

    def __init__(self, workers: Workers) -> None:
        super().__init__()
        self.workers, self.jobs, self.running = workers, deque[Job](), False

    def submit(self, call: Callable[..., T], *arguments: Any) -> "Future[T]":
        job: Job = (Future(), call, arguments)
        self.workers.put(self, job)
        return job[0]

    async def run_parts(self, parts: Generator[None, None, T]) -> T:
        """Return or raise what the generator does; where it yields, others get their turn."""
        while True:
            ended, value = await self.run(advanced, parts)
            if ended:
                result: T = value
                return result

    @property
    def wanted(self) -> bool:
        return bool(self.jobs) or self.workers.wanted


def advanced(parts: Generator[None, None, Any]) -> tuple[bool, Any]:
    """Run the next part; whether it was the last, and then the result."""
    try:
        next(parts)
    except StopIteration as stop:
        return True, stop.value
    return False, None
