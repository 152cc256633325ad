"""Reward workers on the nodes of a Ray cluster. Each actor has a worker as its child process, with the same limits as
on rank 0's node: whatever a completion does there affects neither the actor nor the run, which receive only JSON from
the worker. An actor that dies costs one job; the next job gets a new actor."""

import os
import threading
from collections.abc import Mapping
from typing import Any

from proxima.process.worker import START_SECONDS, JobResult
from proxima.reward.pooled import Job
from proxima.reward.workers.pool import WorkerPool
from proxima.runtime.placement.ray_cluster import ADDRESS, QUIET, first_line_of, kill_actor, start_actor


class RewardActor:
    """`ray.remote(RewardActor)`: a pool of one worker."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.pool = WorkerPool(1, **options)
        self.pool.start()

    def run(self, job: Job) -> JobResult:
        """Run a job, and return its result."""
        (result,) = self.pool.run_now([job])
        return result


class ActorPool(WorkerPool):
    """A `WorkerPool` whose workers are actors, with one core each.

    Args:
        workers, options: as in `WorkerPool`.
    """

    def __init__(self, workers: int, **options: Any) -> None:
        super().__init__(workers, **options)
        self._whole, self._starting = options, threading.Lock()
        self._alive = list[_ActorWorker]()

    def _start_worker(self) -> Any:
        with self._starting:
            if self._server.closed:
                raise RuntimeError("the pool is closed")
            _connect()
            worker = _ActorWorker(self._whole)
            self._alive = [*(other for other in self._alive if other.alive), worker]
        worker.wait()
        return worker

    def close(self) -> None:
        """See `WorkerPool.close`."""
        super().close()
        with self._starting:
            for worker in self._alive:
                worker.kill()


class _ActorWorker:
    """One actor, as `WorkerPool` uses a worker."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._actor = start_actor(RewardActor, None, options, num_cpus=1)
        self.alive, self.jobs_done = True, 0  # never recycled: the actor's own pool replaces the worker below it

    def wait(self) -> None:
        """Wait until the actor is ready. RuntimeError if it does not start."""
        import ray

        try:
            ray.get(self._actor.__ray_ready__.remote(), timeout=START_SECONDS)
        except Exception as error:
            self.kill()
            reason = "the cluster grants no core" if isinstance(error, TimeoutError) else first_line_of(error)
            raise RuntimeError(f"no actor after {START_SECONDS:g} s: {reason}") from error

    def run(self, grader: str, arguments: Mapping[str, Any], seconds: float, cpu_seconds: float | None) -> JobResult:
        """See `Worker.run`. The worker below the actor enforces the time limit; the timeout here is for a lost node."""
        import ray

        job = Job(grader=grader, arguments=arguments, seconds=seconds, cpu_seconds=cpu_seconds)
        try:
            result: JobResult = ray.get(self._actor.run.remote(job), timeout=seconds + 2 * START_SECONDS)
        except Exception as error:  # Ray's errors about an actor are many
            self.kill()
            return JobResult(error=f"its actor died: {first_line_of(error)}")
        return result

    def kill(self) -> int:
        """Kill the actor and its child processes."""
        self.alive = False
        kill_actor(self._actor)
        return 0


def _connect() -> None:
    """Make this process a driver of the cluster that its rank is in."""
    import ray

    if not ray.is_initialized():
        ray.init(address=os.environ.get(ADDRESS, "auto"), **QUIET)
