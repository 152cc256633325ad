"""The ranks of one start: a placement group, an actor for each rank, and the processes that the actors start."""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import proxima
from proxima.config.sections.placement_section import STARTED_BY
from proxima.config.sections.ranks_section import RayPlacement
from proxima.data import FieldError, UserError
from proxima.runtime.placement.rank_host import RankHost, RankPlace
from proxima.runtime.placement.ray_cluster import ADDRESS, bundle_of, first_line_of

LOOK_SECONDS = 1.0  # between checks for Ctrl-C while Ray works
KILL_SECONDS = 10.0  # for the processes to exit before their devices are reused


@dataclass(frozen=True, kw_only=True)
class RankCall:
    """The call that every rank makes: `function` is "module:name", the arguments are JSON values."""

    function: str
    arguments: Mapping[str, Any]


class Attached(Protocol):
    """The servers that the ranks use; with `colocate`, ranks and servers share bundles."""

    granted: Any

    def devices(self, look: Callable[[], None]) -> list[tuple[str, ...]]:
        """The devices of each rank, by bundle, with `colocate`."""
        ...

    def attach(self, host: Any, nodes: Set[str]) -> Mapping[str, str]:
        """Variables of the ranks, which are on `nodes`; `host` is the actor of rank 0."""
        ...


class RankGroup:
    """The actors and places of the ranks, by rank.

    Args:
        placement_group: Ray's, which `stop` removes; None if another object owns it.
    """

    def __init__(self, placement_group: Any, hosts: Sequence[Any]) -> None:
        self.placement_group, self.hosts = placement_group, list(hosts)
        self.places: list[RankPlace] = []

    def name_of(self, rank: int) -> str:
        """`rank 2 on NODE`; with the address if several nodes have the same name."""
        place = self.places[rank]
        nodes = {other.node for other in self.places if other.host == place.host}
        return f"rank {rank} on {place.host}" + (f" ({place.address})" if len(nodes) > 1 else "")

    def stop(self) -> None:
        """Kill the processes and the actors, even if some of them have died before."""
        import ray

        with suppress(Exception):  # of actors that are dead
            ray.wait([host.kill.remote() for host in self.hosts], num_returns=len(self.hosts), timeout=KILL_SECONDS)
        for host in self.hosts:
            with suppress(Exception):
                ray.kill(host)
        if self.placement_group is not None:
            with suppress(Exception):
                ray.util.remove_placement_group(self.placement_group)


def start_group(
    spec: RayPlacement, call: RankCall, look: Callable[[], None], engines: "Attached | None" = None
) -> RankGroup:
    """Start the ranks.

    Args:
        look: called about once a second; an exception from it aborts the start.
        engines: the servers that the ranks use.

    Raises:
        FieldError: the cluster did not grant the devices in time.
        UserError: an actor can't be started, or a node has another version of proxima.
    """
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    deadline = time.monotonic() + spec.start_timeout
    shared = engines if spec.colocate else None
    devices = [] if shared is None else shared.devices(look)
    own = None if shared is not None else placement_group([bundle_of(spec)] * spec.ranks, strategy=spec.strategy)
    granted: Any = own if shared is None else shared.granted
    group = RankGroup(own, [])
    try:
        while not _granted(granted):
            look()
            if time.monotonic() > deadline:
                bound = f"was not enough for the cluster to grant {spec.ranks} ranks"
                remedy = "others use its devices, or a node is lost: see `ray status`, wait, or lower placement.ranks"
                raise FieldError("placement.start_timeout", spec.start_timeout, bound, remedy=remedy)
        actor = ray.remote(RankHost)
        for index in range(spec.ranks):
            bundle = index * spec.bundles // spec.ranks
            strategy = PlacementGroupSchedulingStrategy(granted, placement_group_bundle_index=bundle)
            options = actor.options(
                num_cpus=spec.cpus_per_rank,
                num_gpus=0 if shared is not None else spec.gpus_per_rank,  # the server has them
                max_restarts=0,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
            )
            group.hosts.append(options.remote())
        places: list[RankPlace] = _all([host.place.remote() for host in group.hosts], deadline, look)
        if shared is not None:
            places = [replace(place, gpus=gpus) for place, gpus in zip(places, devices, strict=True)]
        order = rank_order(places, ray.get_runtime_context().get_node_id())
        group.hosts = [group.hosts[index] for index in order]
        group.places = [places[index] for index in order]
        _check_versions(group)
        [port] = _all([group.hosts[0].free_port.remote()], deadline, look)
        nodes, starts = {place.node for place in group.places}, []
        of_engines = {} if engines is None else engines.attach(group.hosts[0], nodes)
        cluster = str(ray.get_runtime_context().gcs_address)  # for actors of rank 0
        for host, variables in zip(group.hosts, rank_variables(group.places, port), strict=True):
            environment = {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", **spec.env, **variables, **of_engines}
            environment[ADDRESS] = cluster
            starts.append(
                host.start.remote(call.function, dict(call.arguments), environment, sys.executable, str(Path.cwd()))
            )
        _all(starts, deadline, look)
        return group
    except BaseException:
        group.stop()
        raise


def _granted(devices: Any) -> bool:
    """True if the cluster has granted the devices by now."""
    try:
        return bool(devices.wait(timeout_seconds=LOOK_SECONDS))
    except Exception as error:  # if the cluster has ended, Ray says that the placement group does not exist
        reason = f"the Ray cluster was lost while the ranks were being started: {first_line_of(error)}"
        raise UserError(reason, remedy="see `ray status`; --resume continues the run") from None


def _all(references: list[Any], deadline: float, look: Callable[[], None]) -> list[Any]:
    """Wait for all calls and return their results."""
    import ray

    waiting = references
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK_SECONDS)
        look()
        if waiting and time.monotonic() > deadline:
            message = f"{len(waiting)} of {len(references)} ranks did not start within placement.start_timeout"
            raise UserError(
                message, remedy="raise it, or see Ray's logs of their nodes in /tmp/ray/session_latest/logs"
            )
    try:
        return list(ray.get(references))
    except Exception as error:  # the actor's own, such as an import that fails there, or Ray's
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        missing = next((line for line in lines if line.startswith(("ModuleNotFoundError", "ImportError"))), "")
        remedy = "install the same packages on all nodes" if missing else ""
        raise UserError(f"a rank could not be started: {missing or first_line_of(error)}", remedy=remedy) from None


def rank_order(places: Sequence[RankPlace], driver: str) -> list[int]:
    """The indices of the actors by rank: node by node, first the node of this process, where the run folder is."""
    sizes = Counter(place.node for place in places)
    return sorted(
        range(len(places)),
        key=lambda index: (places[index].node != driver, -sizes[places[index].node], places[index].node, index),
    )


def rank_variables(places: Sequence[RankPlace], port: int) -> list[dict[str, str]]:
    """The variables that torchrun would set for each rank. Each rank sees the devices of all ranks of its node, in the
    order of the local ranks: it computes on device LOCAL_RANK, and reaches the devices of its neighbours directly."""
    sizes = Counter(place.node for place in places)
    nodes = list(dict.fromkeys(place.node for place in places))
    local: Counter[str] = Counter()
    variables = []
    for rank, place in enumerate(places):
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(local[place.node]),
            "LOCAL_WORLD_SIZE": str(sizes[place.node]),
            "GROUP_RANK": str(nodes.index(place.node)),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(port),
            STARTED_BY: "ray",
        }
        devices = [gpu for other in places if other.node == place.node for gpu in other.gpus]
        variables.append(own | ({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}))
        local[place.node] += 1
    return variables


def python_path() -> str:
    """The folders in which this process finds modules, other than its interpreter's own."""
    installed = tuple({os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)})
    outside = (path for path in map(os.path.abspath, sys.path) if not os.path.realpath(path).startswith(installed))
    return os.pathsep.join(dict.fromkeys(path for path in outside if os.path.isdir(path)))


def _check_versions(group: RankGroup) -> None:
    for rank, place in enumerate(group.places):
        if place.version != proxima.__version__:
            message = f"{group.name_of(rank)} has proxima {place.version}, and this process {proxima.__version__}"
            raise UserError(message, remedy="install the same version on all nodes")
