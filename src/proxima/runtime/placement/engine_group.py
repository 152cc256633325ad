"""The servers of a run on a Ray cluster: an actor each, in their own bundles. A server that dies is restarted wherever
there is room, while the run continues; clients reach it at the same address as before."""

import secrets
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxima.config.sections.ranks_section import RayPlacement
from proxima.data import FieldError, UserError, require
from proxima.engine.serve import LAUNCHES, Serve
from proxima.runtime.placement.engine_host import EngineHost, EnginePlace, EnginePlan
from proxima.runtime.placement.placed_engine import KEY, URLS
from proxima.runtime.placement.rank_group import python_path
from proxima.runtime.placement.ray_cluster import bundle_of, first_line_of

ENGINE_LOG = "engine.log"  # in the run folder
LOOK_SECONDS = 0.5
LONGEST_BREAK = 60.0  # seconds between a death and the next start
SLEEP_MODE = "--enable-sleep-mode"  # of vLLM, on GPUs only
STEADY = 60.0  # seconds of uptime after which earlier deaths are forgotten


def engine_plan(config: Any, folder: Path) -> EnginePlan | None:
    """The plan with which the servers of a run are started; None if the placement starts none.

    Raises:
        FieldError: proxima can't start this kind of engine, or a field conflicts with `placement.engines`.
    """
    count = getattr(config.placement, "engines", 0)
    if not count:
        return None
    engine: Any = getattr(config, "engine", None)
    kind = engine.dialect().kind if hasattr(engine, "dialect") else ""
    kinds = ", ".join(LAUNCHES)
    bound = "starts servers, but proxima can't start one of this engine.kind"
    require(kind in LAUNCHES, "placement.engines", count, bound, remedy=f"set engine.kind to {kinds}, or engines to 0")
    free = engine.url == type(engine).__dataclass_fields__["url"].default
    require(free, "engine.url", engine.url, "is not used where placement.engines starts the servers; leave it out")
    serve = engine.serve or Serve()
    for name, only, why in (("port", 0, "engines may share a node"), ("replicas", 1, "placement.engines counts them")):
        value = getattr(serve, name)
        require(value == only, f"engine.serve.{name}", value, f"must be {only} with placement.engines: {why}")
    if config.placement.colocate and config.placement.gpus_per_rank:
        serve = replace(serve, arguments=(SLEEP_MODE, *serve.arguments))
    return EnginePlan(
        kind=kind,
        serve=serve,
        model=config.model.path,
        max_length=config.model.max_length,
        quantization=engine.quantization,
        sampling_mask=engine.sampling_mask,
        routed_experts=engine.routed_experts,
        shared=engine.weight_folder is not None,
        log=folder.absolute() / ENGINE_LOG,
    )


@dataclass(eq=False)
class PlacedEngine:
    """The state of a server across all its restarts.

    Args:
        host: its actor; None while it waits for its next start, at `again_at`.
        pending: the outstanding call to the actor: `start`, or `failure` once the server has a place.
        deaths: consecutive deaths, without `STEADY` seconds of uptime in between.
    """

    number: int
    host: Any = None
    pending: Any = None
    place: EnginePlace | None = None
    since: float = 0.0
    deaths: int = 0
    again_at: float = 0.0


class EngineGroup:
    """All servers of a run, held by the supervisor; see `engines_on`. With `colocate`, bundles also hold the ranks.

    Args:
        say: called with lines for the user.
    """

    def __init__(self, spec: RayPlacement, plan: EnginePlan, say: Callable[[str], None]) -> None:
        import ray
        from ray.util.placement_group import placement_group

        self.spec, self.plan, self.say, self.key = spec, plan, say, secrets.token_urlsafe(24)
        self.remote = sum(node["Alive"] for node in ray.nodes()) > 1
        self.granted = placement_group([self.bundle] * spec.engines, strategy=spec.strategy)
        self.engines = [PlacedEngine(number) for number in range(spec.engines)]
        self.doors: Any = None  # the actor of rank 0
        self.last_loss = ""

    @property
    def bundle(self) -> dict[str, float]:
        """The resources that one server reserves; with `colocate`, together with its ranks."""
        if self.spec.colocate:
            return bundle_of(self.spec)
        gpus = self.spec.gpus_per_engine
        return {"CPU": self.spec.cpus_per_engine} | ({"GPU": gpus} if gpus else {})

    def start(self, look: Callable[[], None]) -> None:
        """Start all servers; returns when all answer.

        Raises:
            FieldError: the cluster did not grant the devices in time.
            UserError: a server did not start.
        """
        deadline = time.monotonic() + self.spec.start_timeout
        while not self.granted.wait(timeout_seconds=LOOK_SECONDS):
            look()
            if time.monotonic() > deadline:
                count = self.spec.engines
                asked = " and ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
                remedy = (
                    "lower it, or set gpus_per_engine and cpus_per_engine to what the ranks leave free on the nodes"
                )
                raise FieldError(
                    "placement.engines", count, f"asks for {asked} each, not granted in time", remedy=remedy
                )
        while not all(engine.place for engine in self.engines):
            look()
            self.poll()
            if lost := next((engine for engine in self.engines if engine.deaths), None):
                raise UserError(f"engine {lost.number} did not start: {self.last_loss}")
            time.sleep(LOOK_SECONDS)

    def devices(self, look: Callable[[], None]) -> list[tuple[str, ...]]:
        """Return the devices of each rank, with `colocate`. First waits for servers that are restarting, which need
        room on these devices before the ranks use them.

        Raises:
            UserError: a server did not start in time.
        """
        deadline = time.monotonic() + self.spec.start_timeout
        while not all(engine.place for engine in self.engines):
            look()
            self.poll()
            if time.monotonic() > deadline:
                raise UserError(f"the ranks wait for their engines: {self.last_loss}")
            time.sleep(LOOK_SECONDS)
        ranks, gpus = self.spec.ranks // self.spec.engines, int(self.spec.gpus_per_rank)
        places = [engine.place for engine in self.engines if engine.place is not None]
        return [place.gpus[i * gpus : (i + 1) * gpus] for place in places for i in range(ranks)]

    def poll(self) -> None:
        """Restart servers that have died; returns at once."""
        import ray

        for engine in self.engines:
            if engine.host is None:
                if time.monotonic() >= engine.again_at:
                    self._start(engine)
                continue
            if engine.place is not None and time.monotonic() - engine.since > STEADY:
                engine.deaths = 0
            ready, _ = ray.wait([engine.pending], timeout=0)
            if not ready:
                continue
            try:
                answer = ray.get(engine.pending)
            except Exception as error:  # the server's reason, or Ray's errors about an actor
                self._lose(engine, first_line_of(getattr(error, "cause", None) or error))
                continue
            if engine.place is not None:
                self._lose(engine, answer)
                continue
            engine.place, engine.since = answer, time.monotonic()
            engine.pending = engine.host.failure.remote()
            self.say(f"engine {engine.number} on {answer.host} answers at {answer.address}:{answer.port}")
            self._lead(engine)

    def _start(self, engine: PlacedEngine) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self.granted, placement_group_bundle_index=engine.number)
        options = ray.remote(EngineHost).options(
            num_cpus=self.spec.cpus_per_engine,
            num_gpus=self.spec.gpus_of_ranks if self.spec.colocate else self.spec.gpus_per_engine,
            max_restarts=0,
            max_concurrency=2,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
        )
        engine.host = options.remote()
        engine.pending = engine.host.start.remote(self.plan, engine.number, self.key, remote=self.remote)

    def _lose(self, engine: PlacedEngine, reason: str) -> None:
        import ray

        with suppress(Exception):  # it is dead
            ray.kill(engine.host)
        engine.host = engine.pending = engine.place = None
        engine.deaths += 1
        seconds = min(LONGEST_BREAK, 2.0 ** (engine.deaths - 1))
        engine.again_at, self.last_loss = time.monotonic() + seconds, reason
        self.say(f"engine {engine.number} died: {reason}; restarting in {seconds:.0f} s")
        self._lead(engine)

    def attach(self, host: Any, nodes: Set[str]) -> dict[str, str]:
        """Give each server an address on rank 0's node, and return the variables with which the ranks find these.

        Args:
            host: the actor of rank 0.
            nodes: the nodes of all ranks; each rank writes new weights for the servers on its node.

        Raises:
            UserError: a server is on another node, and no folder is set that all nodes share.
        """
        import ray

        for engine in self.engines:
            if engine.place is not None and engine.place.node not in nodes and not self.plan.shared:
                message = f"engine {engine.number} is on {engine.place.host}, where no rank writes weights for it"
                remedy = "set engine.weight_folder to a folder that all nodes share, or place ranks on each node"
                raise UserError(message, remedy=remedy)
        self.doors = host
        ports = ray.get(host.open_doors.remote(len(self.engines)))
        for engine in self.engines:
            self._lead(engine)
        return {URLS: ",".join(f"http://127.0.0.1:{port}" for port in ports), KEY: self.key}

    def _lead(self, engine: PlacedEngine) -> None:
        place = engine.place
        if self.doors is not None:
            self.doors.lead.remote(engine.number, None if place is None else (place.address, place.port))

    def stop(self) -> None:
        """Stop the servers."""
        import ray

        for engine in self.engines:
            with suppress(Exception):
                ray.kill(engine.host)
        with suppress(Exception):
            ray.util.remove_placement_group(self.granted)


@contextmanager
def engines_on(
    spec: RayPlacement, plan: EnginePlan | None, say: Callable[[str], None], look: Callable[[], None]
) -> Iterator[EngineGroup | None]:
    """Run the servers of a plan for the duration of the block; yields None without a plan. This process must be a
    driver of the cluster.

    Args:
        look: called repeatedly while they start; an exception from it aborts the start.
    """
    if plan is None:
        yield None
        return
    group = EngineGroup(spec, plan, say)
    try:
        group.start(look)
        yield group
    finally:
        group.stop()
