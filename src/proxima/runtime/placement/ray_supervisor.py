"""A training command with `placement: ray`: this process supervises ranks that run the same command on a Ray cluster.
It starts them, prints their output, and when one dies, kills the others and restarts all from the last checkpoint."""

import gc
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxima.config.resolution import Recipe
from proxima.config.resolved import Resolved
from proxima.config.sections.placement import STARTED_BY, RayPlacement
from proxima.data import UserError
from proxima.process.exit_status import describe_exit
from proxima.runtime.placement.engine_group import EngineGroup, EnginePlan, engine_plan
from proxima.runtime.placement.node_actors import ActorPlace, RankHost
from proxima.runtime.placement.rank_messages import FoldedLines
from proxima.runtime.placement.ray_cluster import (
    ADDRESS,
    HeadWatch,
    bundle_of,
    connected,
    first_line_of,
    fitted,
    kill_actor,
    reserve,
    say,
    start_actor,
)
from proxima.runtime.state.folder import RunFolder, new_run_folder
from proxima.runtime.watch.interrupt import signals_handled, signals_restored

RANK = "proxima.cli.main:train_rank"  # the function that each rank calls
POLL_SECONDS = 0.5  # in which a rank may print something
GRACE_SECONDS = 3.0  # in which the first cause may be noticed after its consequences, and other ranks end after rank 0
FAILED, INTERRUPTED = 1, 130  # exit codes, as of the command line
AGAIN = {"resume": True, "overwrite": False}  # arguments of the function when the ranks are restarted


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """The end of a rank.

    Args:
        exit_code: -N is signal N; None: it is not known, because its actor is gone.
        reason: why the exit code is not known; else the last line of its standard error, if any.
    """

    rank: int
    exit_code: int | None = None
    reason: str = ""

    @property
    def killed(self) -> bool:
        return self.exit_code is None or self.exit_code < 0


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """The actors of the ranks, their places, and the reports that they stream (see `RankHost.run`), each by rank.

    Args:
        bundles: those of the ranks alone; None: they are the servers' too.
        head: of the cluster.
    """

    hosts: Sequence[Any]
    places: Sequence[ActorPlace]
    reports: Sequence[Any]
    bundles: Any = None
    head: HeadWatch | None = None

    def stop(self) -> None:
        """Kill the actors, and with them the processes, even if some have died before, and give back their bundles."""
        import ray

        if self.head is not None and not self.head.answers():  # it is who kills, and who has the bundles
            ray.wait([host.end.remote() for host in self.hosts], num_returns=len(self.hosts), timeout=GRACE_SECONDS)
            return
        for host in self.hosts:
            kill_actor(host)
        if self.bundles is not None:
            with suppress(Exception):
                ray.util.remove_placement_group(self.bundles)


def train_on_ray(
    resolved: Resolved[Any], recipe: Recipe, overrides: Sequence[str], begin: Mapping[str, bool]
) -> tuple[int, Path]:
    """Train a recipe on the ranks of its placement; returns the exit code of the command, and the run folder.

    Args:
        resolved: the recipe with its overrides.
        recipe: a path, a name, or a mapping of JSON values.
        begin: further arguments of `train_recipe`.

    Raises:
        UserError: the cluster can't start the ranks, or the servers.
    """
    config = resolved.config
    folder = new_run_folder(config.folder, resolved.recipe).absolute()  # the same at each start of the ranks
    RunFolder(folder).check(resume=begin["resume"], overwrite=begin["overwrite"])
    texts = [text for text in overrides if not text.startswith("folder=")]
    arguments = {"recipe": recipe, "override": [*texts, f"folder={folder}"], **begin}
    gc.enable()
    plan = engine_plan(config, folder)
    return supervise(RANK, config.placement, arguments, plan), folder


def supervise(
    function: str, spec: RayPlacement, arguments: Mapping[str, Any], engines: EnginePlan | None = None
) -> int:
    """Call a function in every rank, each in a separate process with the variables of torchrun; returns the exit code.

    A rank's exit code is what the function returns. That of rank 0 is the run's, unless a rank is killed or lost: then
    all ranks are killed and restarted, at most `spec.restarts` times. A rank that raises ends the run, because it would
    raise again. The first Ctrl-C goes to rank 0 alone, which stops the run; a second one kills all ranks.

    Args:
        function: "module:name".
        arguments: of the function, by name; JSON values.
        engines: the plan for the servers that `spec.engines` asks for; None: no servers. They start before the ranks
            and run through all restarts of these; rank 0 finds their addresses with `placed_engine`.

    Raises:
        FieldError: the cluster can't be reached, or lacks the devices; before anything is started.
        UserError: the ranks can't be started, or the head of the cluster is lost.
        KeyboardInterrupt: Ctrl-C while they are being started.
    """
    with signals_restored(), connected(spec), signals_handled(signal.default_int_handler):  # Ray has set its own
        spec = fitted(spec)
        placed = None if engines is None else EngineGroup(spec, engines)
        interrupts: list[int] = []
        for starts in range(spec.restarts + 1):
            group = start_group(spec, function, arguments, placed)
            try:
                with signals_handled(lambda number, frame: interrupts.append(number)):
                    ends = await_ranks(group, interrupts, placed)
                    if first_cause(ends).killed and group.head is not None:  # perhaps its node was lost, and the head's
                        group.head.wait()
            finally:
                if placed is not None and (group.head is None or group.head.answers()):
                    placed.stop_growing()
                group.stop()
            end = first_cause(ends)
            if interrupts and end.exit_code != 0:
                return INTERRUPTED
            cause = describe_end(end, group)
            if not end.killed:  # an exception would be raised again
                if end.rank > 0 and all(other.rank > 0 for other in ends):  # rank 0 has said nothing of it
                    say(f"error: {cause}: the run ends, --resume continues it")
                return end.exit_code or 0
            if starts < spec.restarts:
                number = f"restart {starts + 1} of at most {spec.restarts}"
                say(f"{cause}; all ranks restart from the last checkpoint, {number}")
            arguments = {**arguments, **AGAIN}
        say(f"error: {cause}; after {spec.restarts} restarts (placement.restarts): the run ends, --resume continues it")
        return FAILED


def await_ranks(group: RankGroup, interrupts: Sequence[int], placed: EngineGroup | None) -> list[RankEnd]:
    """Print the ranks' output until the run is over: that of rank 0 as it is, the lines of the others, which are those
    from outside the run, with their rank. Returns how they ended, in the order in which it was noticed.

    Args:
        interrupts: a signal is added to them each time the user interrupts the run.

    Raises:
        UserError: the head of the cluster is lost.
    """
    import ray

    reports: dict[Any, int] = {report: rank for rank, report in enumerate(group.reports)}
    others = FoldedLines(say)
    ends = list[RankEnd]()
    last = [""] * len(reports)
    passed_on = 0
    deadline = math.inf
    while reports and time.monotonic() < deadline:
        ready, _ = ray.wait(list(reports), num_returns=1, timeout=POLL_SECONDS)
        for report in ready:
            rank = reports[report]
            try:
                event: Any = ray.get(next(report))  # type: ignore[arg-type]  # Ray's stubs know no streams
            except Exception as error:  # Ray's errors about an actor are many
                event = None
                last[rank] = _reason(error)
            if event is None or isinstance(event, int):
                del reports[report]
                ends.append(RankEnd(rank=rank, exit_code=event, reason=last[rank]))
                if rank == 0 or event != 0:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                continue
            stream, lines = event
            if rank == 0:
                printed = sys.stdout if stream == 1 else sys.stderr
                print(*lines, sep="\n", file=printed, flush=True)
            for line in filter(str.strip, lines):
                if stream == 2:
                    last[rank] = line.strip()
                if rank > 0:
                    others.add(rank, line)
        others.flush()
        if group.head is not None and not ends:
            group.head.check()
        if placed is not None:
            placed.poll()
            if not ends and not interrupts:  # a run that ends, as it should or not, needs no server
                placed.grow()
        if len(interrupts) > passed_on:
            passed_on = len(interrupts)
            if passed_on > 1 or any(end.rank == 0 for end in ends):
                break
            say("stopping: rank 0 writes a checkpoint first; press Ctrl-C again to kill all ranks")
            group.hosts[0].interrupt.remote()
    others.flush(at_once=True)
    return ends or [RankEnd(rank=0, exit_code=INTERRUPTED)]


def first_cause(ends: Sequence[RankEnd]) -> RankEnd:
    """The end that decides about the run. A rank that was killed or lost breaks the collectives of the others, which
    then raise or exit, and rank 0 reports that and fails; without such a rank, rank 0's own end is the run's."""
    own: RankEnd | None = None
    killed = list[RankEnd]()
    for end in ends:
        # torch aborts a rank whose peers are gone: after rank 0's own end, an abort is not the cause
        follows = own is not None and end.exit_code == -signal.SIGABRT
        if end.killed and not follows:
            killed.append(end)
        if own is None and end.rank == 0:
            own = end
    if own is not None and (not killed or own.exit_code in (0, INTERRUPTED)):
        return own
    if killed:
        return killed[0]
    failed = [end for end in ends if end.exit_code != 0]
    return failed[0] if failed else ends[0]


def describe_end(end: RankEnd, group: RankGroup) -> str:
    """`rank 2 on NODE ended with exit code 1; its last line: …`."""
    import ray

    name = f"rank {end.rank} on {group.places[end.rank].host}"
    if end.exit_code is None:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if group.places[end.rank].node not in alive:
            return f"{name} died: its node was lost"
        return f"{name} died: {end.reason}"
    verb = "died:" if end.killed else "ended with"
    described = f"{name} {verb} {describe_exit(end.exit_code)}"
    if not end.reason:
        return described
    return f"{described}; its last line: {end.reason}"


def _reason(error: Exception) -> str:
    from ray.exceptions import ActorUnavailableError, OutOfMemoryError

    if isinstance(error, OutOfMemoryError) or "memory pressure" in str(error):
        return "Ray killed its actor because the node ran out of memory"
    if isinstance(error, ActorUnavailableError):
        return "its node does not answer"
    return "its actor was killed"


def start_group(
    spec: RayPlacement, function: str, arguments: Mapping[str, Any], engines: EngineGroup | None
) -> RankGroup:
    """Start the ranks, on nodes that are alive now; every one calls `function`, "module:name".

    Args:
        arguments: JSON values.

    Raises:
        FieldError: the cluster did not grant the devices in time.
        UserError: an actor can't be started.
    """
    import ray

    servers = engines if spec.colocate else None
    if servers is None:
        reserved = reserve(spec, "ranks", bundle_of(spec))
        bundles = reserved
        gpus = spec.gpus_per_rank
    else:  # they have the devices
        reserved = None
        bundles = servers.bundles
        gpus = 0.0
    per_bundle = spec.ranks // spec.bundles
    hosts = [
        start_actor(RankHost, (bundles, index // per_bundle), num_cpus=spec.cpus_per_rank, num_gpus=gpus)
        for index in range(spec.ranks)
    ]
    try:
        places = ray.get([host.place.remote() for host in hosts], timeout=spec.start_timeout)
    except Exception as error:
        raise _not_started(error, spec) from None
    if servers is not None:
        places = [replace(place, gpus=devices) for place, devices in zip(places, servers.devices(), strict=True)]
    context = ray.get_runtime_context()
    order = rank_order(places, context.get_node_id())
    hosts = [hosts[index] for index in order]
    places = [places[index] for index in order]
    common = {**spec.env, ADDRESS: str(context.gcs_address)}  # for actors of rank 0
    if engines is not None:
        common |= engines.attach(places)
    reports = list[Any]()
    for host, variables in zip(hosts, rank_variables(places), strict=True):
        run = host.run.options(num_returns="streaming")
        reports.append(run.remote(function, dict(arguments), common | variables, str(Path.cwd())))
    head = HeadWatch(str(context.gcs_address))
    return RankGroup(hosts=hosts, places=places, reports=reports, bundles=reserved, head=head)


def _not_started(error: Exception, spec: RayPlacement) -> UserError:
    """The user's error for an actor that did not start: its own error, such as a failed import, or one of Ray's."""
    from ray.exceptions import GetTimeoutError

    if isinstance(error, GetTimeoutError):
        late = f"the ranks did not start within placement.start_timeout={spec.start_timeout:g} s"
        return UserError(late, remedy="see `ray status` and Ray's logs of the nodes in /tmp/ray/session_latest/logs")
    lines = [line.strip() for line in str(error).splitlines()]
    failed_imports = [line for line in lines if line.startswith(("ModuleNotFoundError", "ImportError"))]
    if failed_imports:
        reason = f"a rank could not be started: {failed_imports[0]}"
        return UserError(reason, remedy="install the same packages on all nodes")
    return UserError(f"a rank could not be started: {first_line_of(error)}")


def rank_order(places: Sequence[ActorPlace], driver: str) -> list[int]:
    """The indices of the actors by rank: node by node, first the node of this process, where the run folder is."""
    sizes = Counter(place.node for place in places)

    def turn(index: int) -> tuple[bool, int, str, int]:
        node = places[index].node
        return node != driver, -sizes[node], node, index

    return sorted(range(len(places)), key=turn)


def rank_variables(places: Sequence[ActorPlace]) -> list[dict[str, str]]:
    """The variables that torchrun would set for each rank. Each rank sees the devices of all ranks of its node, in the
    order of the local ranks: it computes on device LOCAL_RANK, and reaches the devices of its neighbours directly."""
    nodes = list(dict.fromkeys(place.node for place in places))
    variables = []
    for rank, place in enumerate(places):
        neighbours = [other for other, there in enumerate(places) if there.node == place.node]
        devices = [gpu for other in neighbours for gpu in places[other].gpus]
        of_rank = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(neighbours.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(neighbours)),
            "GROUP_RANK": str(nodes.index(place.node)),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(places[0].port),
            STARTED_BY: "ray",
        }
        if devices:
            of_rank["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        variables.append(of_rank)
    return variables
