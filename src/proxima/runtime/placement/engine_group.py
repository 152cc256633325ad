"""The servers of a run on a Ray cluster: an actor each, in bundles that are reserved once. A server that dies is
restarted at the same port, while the run continues. Their addresses are in a file that rank 0 reads again and again
(`engine.url`): one that comes back at another address, because its node is lost, and one that is started in the middle
of the run join by it."""

import math
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from proxima.config.schema import RunConfig
from proxima.config.sections.offline import OfflineConfig
from proxima.config.sections.placement import RayPlacement, engines_can_start, starts_servers, way_to_placed
from proxima.data import FieldError, UserError, within
from proxima.engine.serve.launch import Serve
from proxima.engine.serve.servers import start_servers
from proxima.runtime.placement.launcher import KEY, SERVERS
from proxima.runtime.placement.node_actors import ActorPlace, EngineHost
from proxima.runtime.placement.ray_cluster import bundle_of, first_line_of, kill_actor, reserve, say, start_actor
from proxima.runtime.state.folder import RunFolder
from proxima.system.atomic_files import write_atomic

CHECK_SECONDS = 0.5
LONGEST_BREAK = 60.0  # seconds between a death and the next start


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """How every server of a run is started.

    Args:
        arguments: of `start_servers`; the log is the first server's, on its node, and the others' have their number in
            the name.
        file: for the addresses of the servers.
        unreached: why new weights do not get to other nodes than that of rank 0, with the remedy; None: they do, by a
            group, by a folder that all of them see, or because each rank hands them to the server on its device.
    """

    arguments: dict[str, Any]
    file: Path
    unreached: FieldError | None = None

    def start_of(self, number: int, key: str, *, remote: bool, port: int = 0) -> Callable[[], Any]:
        """The call that starts one of the servers, on its node.

        Args:
            key: the key that its clients must send.
            remote: True if clients are on other nodes too.
            port: that it listens at; 0: a free one.
        """
        serve = replace(self.arguments["serve"], port=port)
        log = self.arguments["log"]
        if remote:
            serve = replace(serve, arguments=(*serve.arguments, "--host", "0.0.0.0"))  # the last value wins
        if number:
            log = log.with_name(f"{log.stem}.{number}{log.suffix}")
        return partial(start_servers, **self.arguments | {"serve": serve, "log": log, "key": key})


def engine_plan(config: RunConfig | OfflineConfig, folder: Path) -> EnginePlan | None:
    """The plan with which the servers of a run are started; None if the placement starts none.

    Raises:
        FieldError: proxima can't start this kind of engine, or a field conflicts with `placement.engines`.
    """
    placement = config.placement
    if not starts_servers(placement):
        return None
    engine: Any = config.engine if isinstance(config, RunConfig) else None
    # of a run that trains on a data set, which has no engine
    for finding in engines_can_start(placement, engine, config.model):
        assert isinstance(finding, tuple)
        field, message = finding
        raise FieldError(field, attrgetter(field)(config), message)
    serve = engine.serve or Serve()
    if placement.shares_gpus:
        serve = replace(serve, arguments=(*engine.dialect().sleep_options, *serve.arguments))
    settings = engine.launch_options(config.model.adapter_rank) | {
        "kind": engine.dialect().kind,
        "serve": serve,
        "model": config.model.path,
        "max_length": config.model.max_length,
        "log": RunFolder(folder.absolute()).engine_log,
    }
    unreached = None
    try:
        with within("engine"):
            way_to_placed(placement, engine, adapter_rank=config.model.adapter_rank, elsewhere=True)
    except FieldError as error:
        unreached = error
    return EnginePlan(arguments=settings, file=RunFolder(folder.absolute()).servers, unreached=unreached)


@dataclass(eq=False)
class PlacedEngine:
    """The state of a server across all its restarts.

    Args:
        host: its actor; None while it waits for its next start, at `again_at`.
        reports: the outstanding call to the actor, see `EngineHost.run`.
        address: host and port where rank 0's node reaches it, or reached it last.
        deaths: how many times it has died.
    """

    number: int
    bundle: tuple[Any, int]
    host: Any = None
    reports: Any = None
    place: ActorPlace | None = None
    address: tuple[str, int] = ("", 0)
    deaths: int = 0
    again_at: float = 0.0


class EngineGroup:
    """All servers of a run, held by the supervisor, which starts them and waits until all answer. They end when this
    process disconnects from the cluster. With `colocate`, `bundles` also hold the ranks. While there are fewer than
    `max_engines`, one more is requested from the cluster, and started when that grants the devices: because a node has
    joined, or another user's job has ended.

    Raises:
        FieldError: the cluster did not grant the devices in time.
        UserError: a server did not start.
    """

    def __init__(self, spec: RayPlacement, plan: EnginePlan) -> None:
        import ray

        self.spec = spec
        self.plan = plan
        self.key = secrets.token_urlsafe(24)
        nodes = sum(node["Alive"] for node in ray.nodes())
        self.remote = nodes > 1 or spec.max_engines > spec.engines
        gpus = spec.gpus_of_server
        self.resources = {"num_cpus": spec.cpus_per_engine, "num_gpus": gpus}
        self.alone = {"CPU": spec.cpus_per_engine}
        if gpus:
            self.alone["GPU"] = gpus
        bundle = bundle_of(spec) if spec.colocate else self.alone
        self.bundles = reserve(spec, "engines", bundle)
        self._require_reach()
        self.engines = [PlacedEngine(number, (self.bundles, number)) for number in range(spec.engines)]
        self.last_loss = ""  # which server died, and why
        self._requested: Any = None  # the bundle of one more server, which the cluster has not granted yet
        self._await_all(deaths=0)

    def _require_reach(self) -> None:
        """Raise FieldError, before a server loads a model, if new weights would not reach all nodes that have one."""
        from ray.util.placement_group import placement_group_table

        nodes = set(placement_group_table(self.bundles)["bundles_to_node_id"].values())
        if len(nodes) > 1:
            self._require_ways(f"the {self.spec.engines} servers are on {len(nodes)} nodes")

    def _require_ways(self, where: str) -> None:
        error = self.plan.unreached
        if error is not None:
            bound = f"{error.bound}: {where}"
            raise FieldError(error.field, error.value, bound, remedy=error.remedy)

    def _await_all(self, deaths: float, seconds: float = math.inf) -> None:
        deadline = time.monotonic() + seconds
        while not all(engine.place for engine in self.engines):
            self.poll()
            if time.monotonic() > deadline or any(engine.deaths > deaths for engine in self.engines):
                raise UserError(f"the engines did not start: {self.last_loss}")
            time.sleep(CHECK_SECONDS)

    def devices(self) -> list[tuple[str, ...]]:
        """Return the devices of each rank, with `colocate`. First waits for servers that are restarting, which need
        room on these devices before the ranks use them.

        Raises:
            UserError: a server did not start in time.
        """
        self._await_all(deaths=math.inf, seconds=self.spec.start_timeout)
        ranks = self.spec.ranks // self.spec.engines
        gpus = int(self.spec.gpus_per_rank)
        devices = []
        for engine in self.engines:
            if engine.place is not None:
                for rank in range(ranks):
                    devices.append(engine.place.gpus[rank * gpus : (rank + 1) * gpus])
        return devices

    def poll(self) -> None:
        """Restart servers that have died, and write the addresses of all; returns at once."""
        import ray

        for engine in self.engines:
            if engine.host is None:
                if time.monotonic() >= engine.again_at:
                    start = self.plan.start_of(engine.number, self.key, remote=self.remote, port=engine.address[1])
                    engine.host = start_actor(EngineHost, engine.bundle, **self.resources)
                    engine.reports = engine.host.run.options(num_returns="streaming").remote(start)
                continue
            ready, _ = ray.wait([engine.reports], timeout=0)
            if not ready:
                continue
            try:
                answer = ray.get(next(engine.reports))
            except Exception as error:  # the server's reason, or Ray's errors about an actor
                self._lose(engine, first_line_of(getattr(error, "cause", None) or error))
                continue
            reached = answer
            if not self.remote:  # it listens there alone
                reached = replace(answer, address="127.0.0.1")
            engine.place = reached
            engine.address = (reached.address, reached.port)
            say(f"engine {engine.number} on {answer.host} answers at {reached.address}:{reached.port}")
            self._write()

    def _lose(self, engine: PlacedEngine, reason: str) -> None:
        kill_actor(engine.host)
        engine.host = None
        engine.reports = None
        engine.place = None
        engine.deaths += 1
        seconds = min(LONGEST_BREAK, 2.0 ** (engine.deaths - 1))
        engine.again_at = time.monotonic() + seconds
        self.last_loss = f"engine {engine.number} died: {reason}"
        say(f"{self.last_loss}; restarting in {seconds:.0f} s")

    def _write(self) -> None:
        """Write the addresses of all servers that have answered; one that is restarting keeps its line."""
        text = "# the servers of the run, by its supervisor\n"
        for engine in self.engines:
            host, port = engine.address
            if host:
                text += f"http://{host}:{port}\n"
        self.plan.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.plan.file, text)

    def grow(self) -> None:
        """Start one more server if it is wanted and the cluster has granted its devices; returns at once."""
        from ray.util.placement_group import placement_group, placement_group_table

        if len(self.engines) >= self.spec.max_engines:
            return
        if self._requested is None:
            self._requested = placement_group([self.alone])
        elif placement_group_table(self._requested)["state"] == "CREATED":
            engine = PlacedEngine(len(self.engines), (self._requested, 0))
            self._requested = None
            self.engines.append(engine)
            say(f"engine {engine.number} is started: the cluster has devices for it")

    def stop_growing(self) -> None:
        """Withdraw the request for one more server, which would be granted the devices of ranks that are restarted."""
        from ray.util.placement_group import remove_placement_group

        if self._requested is not None:
            with suppress(Exception):  # the cluster has ended
                remove_placement_group(self._requested)
        self._requested = None

    def attach(self, ranks: Sequence[ActorPlace]) -> dict[str, str]:
        """Return the variables with which the ranks find the servers.

        Args:
            ranks: their places.

        Raises:
            FieldError: a server is on another node than rank 0, which new weights don't reach.
        """
        for engine in self.engines:
            if engine.place is not None and engine.place.node != ranks[0].node:
                self._require_ways(f"engine {engine.number} is on {engine.place.host}, and rank 0 is not")
        self._write()
        return {SERVERS: str(self.plan.file), KEY: self.key}
