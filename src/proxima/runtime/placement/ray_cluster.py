"""The Ray cluster of a run: connecting to it or starting one, its devices, and actors on these, such as reward workers.
Every failure is one line that the user can act on."""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from proxima.config.sections.placement import RayPlacement
from proxima.data import FieldError, UserError
from proxima.data.errors import counted
from proxima.process.worker import START_SECONDS, JobResult
from proxima.reward.base import Job
from proxima.reward.workers.pool import WorkerPool

ADDRESS = "RAY_ADDRESS"
QUIET: Any = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}  # of `ray.init`
WAIT_SECONDS = 1.0  # between two chances of a signal handler to run while Ray works
# a head that has not answered for so long is lost; Ray, which waits for a minute, then ends the process with no word
# about the run
HEAD_SECONDS = 25.0
HEAD_POLL = 2.0  # between two questions


@contextmanager
def connected(spec: RayPlacement) -> Iterator[None]:
    """Make this process a driver of the cluster within the block; with the block end its actors, and a cluster that is
    started here.

    Raises:
        FieldError: there is no cluster at the address, or it refuses this process.
        UserError: this process is connected already, or no cluster can be started here.
    """
    # even without `log_to_driver`, a driver prints Ray's twenty lines about a dead node; Ray reads this when imported
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster started here; by default ranks yield to all
    import ray

    if ray.is_initialized():
        raise UserError("this process uses a Ray cluster already", remedy="call ray.shutdown() before the run")
    address = spec.address or os.environ.get(ADDRESS)
    if address and address != "auto":
        _require_listener(address)
    try:
        ray.init(address=address or "local", **QUIET)
    except Exception as error:  # Ray raises whatever its parts raise
        reason = first_line_of(error)
        if address is None:
            raise UserError(f"no Ray cluster could be started on this machine: {reason}") from None
        if "auth" in reason.lower() or "token" in reason.lower():
            reason = f"{reason}; all its nodes need one token, ~/.ray/auth_token or RAY_AUTH_MODE=disabled"
        raise FieldError("placement.address", address, f"refuses this process: {reason}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raise if nothing listens at the address: Ray itself would try for a minute and end the process."""
    host, _, port = address.rpartition(":")
    form = "is HOST:PORT of the cluster's head, as `ray start --head` prints it"
    if "://" in address or not host or not port.isdecimal() or int(port[:6]) > 65535:
        raise FieldError("placement.address", address, form)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        reason = f"has no cluster: {error.strerror or error}"
        remedy = f"start the cluster, or correct the address or {ADDRESS}; null starts one on this machine"
        raise FieldError("placement.address", address, reason, remedy=remedy) from None


class HeadWatch:
    """Notices that the head of the cluster is gone: calls of Ray would wait for it, and the ranks that it leaves
    running would be nobody's.

    Args:
        address: HOST:PORT of the head.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._asked_at = time.monotonic()
        self._answered_at = self._asked_at

    def check(self) -> None:
        """Ask it now and then.

        Raises:
            UserError: it has not answered for `HEAD_SECONDS`.
        """
        if time.monotonic() - self._asked_at >= HEAD_POLL:
            self._require()

    def wait(self) -> None:
        """Return once it answers.

        Raises:
            UserError: as for `check`.
        """
        while not self._require():
            time.sleep(WAIT_SECONDS)

    def answers(self) -> bool:
        """Ask it now."""
        self._asked_at = time.monotonic()
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT_SECONDS).close()
        except OSError:
            return False
        self._answered_at = self._asked_at
        return True

    def _require(self) -> bool:
        if self.answers():
            return True
        if self._asked_at - self._answered_at >= HEAD_SECONDS:
            reason = f"the head of the Ray cluster, {self.address}, has not answered for {HEAD_SECONDS:g} s"
            raise UserError(reason, remedy="start the cluster again; --resume continues the run")
        return False


def first_line_of(error: BaseException) -> str:
    """The first line of a Ray error, without the process states below it."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].strip().rstrip(".:")


def bundle_of(spec: RayPlacement) -> dict[str, float]:
    """The resources that one rank reserves; with `colocate`, a server and its ranks."""
    bundle = {"CPU": spec.ranks // spec.bundles * spec.cpus_per_rank}
    if spec.colocate:
        bundle["CPU"] += spec.cpus_per_engine
    if spec.gpus_of_ranks:
        bundle["GPU"] = spec.gpus_of_ranks
    return bundle


def say(line: str) -> None:
    """Print a line of the supervisor, beside what the ranks print."""
    print(line, file=sys.stderr, flush=True)


def fitted(spec: RayPlacement) -> RayPlacement:
    """Check, before anything starts, that the nodes have the devices that the ranks request, even if they are in use.

    Returns: the placement; where no node has a GPU, with ranks that compute on CPUs, which is said.
    Raises:
        FieldError: names the devices requested, those available, and the remedy.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if spec.gpus_per_rank and not spec.engines and not any(node.get("GPU") for node in nodes):
        say("no node of the cluster has a GPU: the ranks compute on CPUs")
        spec = replace(spec, gpus_per_rank=0.0)
    bundle = bundle_of(spec)
    fits = [_bundles_on(node, bundle) for node in nodes]
    ranks = {"STRICT_PACK": max(fits, default=0), "STRICT_SPREAD": sum(fit > 0 for fit in fits)}
    possible = ranks.get(spec.strategy, sum(fits))
    if possible >= spec.bundles:
        return spec
    totals = {name: sum(node.get(name, 0) for node in nodes) for name in bundle}
    bound = (
        f"asks for {_listed(bundle)} each, with {spec.strategy}, and the cluster has {_listed(totals)} on "
        f"{counted(len(nodes), 'node')}, room for {possible}"
    )
    remedy = "lower it, or add nodes"
    if spec.gpus_per_rank and not totals["GPU"]:
        remedy = "set gpus_per_rank=0 to compute on CPUs, or add nodes"
    name = "engines" if spec.colocate else "ranks"
    raise FieldError(f"placement.{name}", spec.bundles, bound, remedy=remedy)


def _bundles_on(node: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many bundles fit on a node, if nobody uses it."""
    return min(int(node.get(name, 0) // amount) for name, amount in bundle.items())


def _listed(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def reserve(spec: RayPlacement, field: str, bundle: dict[str, float]) -> Any:
    """Ray's placement group of as many bundles as the placement's `field` says: `ranks`, or `engines`. It is the run's
    until it is removed, or this process disconnects.

    Raises:
        FieldError: the cluster did not grant the devices in time.
        UserError: the cluster ended.
    """
    from ray.util.placement_group import placement_group

    count = getattr(spec, field)
    deadline = time.monotonic() + spec.start_timeout
    granted = placement_group([bundle] * count, spec.strategy)
    while not _is_granted(granted):
        if time.monotonic() > deadline:
            late = f"asks for {_listed(bundle)} each, not granted within start_timeout={spec.start_timeout:g} s"
            remedy = "others use the devices, or a node is lost: see `ray status`, wait, or ask for less"
            raise FieldError(f"placement.{field}", count, late, remedy=remedy)
    return granted


def _is_granted(bundles: Any) -> bool:
    try:
        return bool(bundles.wait(timeout_seconds=WAIT_SECONDS))
    except Exception as error:  # if the cluster has ended, Ray says that the placement group does not exist
        reason = f"the Ray cluster was lost while the run was being started: {first_line_of(error)}"
        raise UserError(reason, remedy="see `ray status`; --resume continues the run") from None


def start_actor(kind: type, place: tuple[Any, int] | None, *arguments: object, **resources: float) -> Any:
    """Start an actor. When it dies it stays dead: what runs again is decided by who watches it.

    Args:
        place: bundles, and the index of the one for the actor; None: any node.
    """
    import ray
    from ray._private import auto_init_hook
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # else a thread that kills it too late, after the disconnect, starts a cluster; the variable RAY_ENABLE_AUTO_CONNECT
    # would be read before this, and reach code of users
    auto_init_hook.enable_auto_connect = False
    strategy: Any = "SPREAD"
    if place is not None:
        strategy = PlacementGroupSchedulingStrategy(*place)
    actor: Any = ray.remote(kind)
    options = actor.options(
        max_restarts=0,
        max_concurrency=2,
        scheduling_strategy=strategy,
        runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
        **resources,
    )
    return options.remote(*arguments)


def kill_actor(actor: Any) -> None:
    """Kill an actor, which may be dead, and what it has started."""
    import ray

    with suppress(Exception):
        ray.kill(actor)


def python_path() -> str:
    """The folders in which this process finds modules, other than its interpreter's own."""
    installed = tuple({os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)})
    folders = dict.fromkeys(map(os.path.abspath, sys.path))
    outside = [folder for folder in folders if not os.path.realpath(folder).startswith(installed)]
    return os.pathsep.join(filter(os.path.isdir, outside))


# ---- reward workers on the nodes -------------------------------------------------------------------------------------
#
# Each actor has a worker as its child process, with the same limits as on rank 0's node: whatever a completion does
# there affects neither the actor nor the run, which receive only JSON from the worker. An actor that dies costs one
# job; the next job gets a new actor.


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
        self._options = options
        self._starting = threading.Lock()
        self._alive = list[_ActorWorker]()

    def check(self) -> None:
        """Do nothing: each actor starts what its worker needs, on its node."""

    def _start_worker(self) -> Any:
        with self._starting:
            if self._server.closed:
                raise RuntimeError("the pool is closed")
            _connect()
            worker = _ActorWorker(self._options)
            self._alive = [other for other in self._alive if other.alive]
            self._alive.append(worker)
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
        self.alive = True
        self.jobs_done = 0  # never recycled: the actor's own pool replaces the worker below it

    def wait(self) -> None:
        """Wait until the actor is ready. RuntimeError if it does not start."""
        import ray

        try:
            ray.get(self._actor.__ray_ready__.remote(), timeout=START_SECONDS)
        except Exception as error:
            self.kill()
            late = isinstance(error, TimeoutError)
            reason = "the cluster grants no core" if late else first_line_of(error)
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
