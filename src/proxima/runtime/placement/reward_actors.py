"""Reward workers on the nodes of a Ray cluster. Each actor has a worker as its child process, with the same limits as
on rank 0's node: whatever a completion does there affects neither the actor nor the run, which receive only JSON from
the worker. If an actor dies, its job is lost; the next job gets a new actor."""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from proxima.process.worker import START_SECONDS, JobResult
from proxima.reward.base import Job
from proxima.reward.workers.pool import WorkerPool
from proxima.runtime.placement.ray_cluster import ADDRESS, first_line_of

PING_SECONDS = 10.0  # in which an actor that is idle answers


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
        self._whole = options

    def _start_worker(self) -> Any:
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            _connect()
            self.started += 1
        return _ActorWorker(self._whole)


class _ActorWorker:
    """One actor, as `WorkerPool` uses a worker."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import ray

        actor: Any = ray.remote(RewardActor)
        self._actor = actor.options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD").remote(options)
        self.alive, self.jobs_done = True, 0  # never recycled: the actor's own pool replaces the worker below it
        try:
            ray.get(self._actor.__ray_ready__.remote(), timeout=START_SECONDS)
        except Exception as error:
            self.kill()
            reason = "the cluster grants no core" if isinstance(error, TimeoutError) else first_line_of(error)
            raise RuntimeError(f"no actor after {START_SECONDS:g} s: {reason}") from error

    def run(
        self, grader: str, arguments: Mapping[str, Any], seconds: float, cpu_seconds: float | None
    ) -> JobResult | None:
        """See `Worker.run`. The worker below the actor enforces the time limit; the timeout here is for a lost node."""
        import ray

        try:
            ray.get(self._actor.__ray_ready__.remote(), timeout=PING_SECONDS)
        except Exception:  # Ray's errors about an actor are many
            self.kill()
            return None
        try:
            job = Job(grader=grader, arguments=arguments, seconds=seconds, cpu_seconds=cpu_seconds)
            result: Any = ray.get(self._actor.run.remote(job), timeout=seconds + 2 * START_SECONDS)
            return cast(JobResult, result)
        except Exception as error:
            self.kill()
            return JobResult(error=f"its actor died: {first_line_of(error)}")

    def kill(self) -> int:
        """Kill the actor and its child processes."""
        import ray

        self.alive = False
        with suppress(Exception):
            ray.kill(self._actor)
        return 0


def _connect() -> None:
    """Make this process a driver of the cluster that its rank is in."""
    import ray

    if not ray.is_initialized():
        ray.init(
            address=os.environ.get(ADDRESS, "auto"), logging_level=logging.ERROR, log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
        )  # fmt: skip
