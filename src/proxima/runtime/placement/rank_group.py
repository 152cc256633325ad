"""The ranks of one start: an actor for each, on a bundle that the run has reserved, and the process that it starts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxima.config.sections.placement_section import STARTED_BY, RayPlacement
from proxima.data import UserError
from proxima.runtime.placement.engine_group import EngineGroup
from proxima.runtime.placement.node_actors import ActorPlace, RankHost
from proxima.runtime.placement.ray_cluster import ADDRESS, bundle_of, first_line_of, kill_actor, reserve, start_actor


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """The actors of the ranks, their places, and the reports that they stream (see `RankHost.run`), each by rank.

    Args:
        bundles: those of the ranks alone; None: they are the servers' too.
    """

    hosts: Sequence[Any]
    places: Sequence[ActorPlace]
    reports: Sequence[Any]
    bundles: Any = None

    def stop(self) -> None:
        """Kill the actors, and with them the processes, even if some have died before, and give back their bundles."""
        import ray

        for host in self.hosts:
            kill_actor(host)
        if self.bundles is not None:
            with suppress(Exception):
                ray.util.remove_placement_group(self.bundles)


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

    servers = engines if spec.colocate else None  # they have the devices
    own = None if servers else reserve(spec, "ranks", bundle_of(spec))
    bundles, gpus = (servers.bundles, 0.0) if servers else (own, spec.gpus_per_rank)
    per_bundle = spec.ranks // spec.bundles
    hosts = [
        start_actor(RankHost, (bundles, index // per_bundle), num_cpus=spec.cpus_per_rank, num_gpus=gpus)
        for index in range(spec.ranks)
    ]
    try:
        places = ray.get([host.place.remote() for host in hosts], timeout=spec.start_timeout)
    except Exception as error:
        raise _not_started(error, spec) from None
    if servers:
        places = [replace(place, gpus=devices) for place, devices in zip(places, servers.devices(), strict=True)]
    context = ray.get_runtime_context()
    order = rank_order(places, context.get_node_id())
    hosts, places = [hosts[index] for index in order], [places[index] for index in order]
    common = {**spec.env, ADDRESS: str(context.gcs_address)}  # for actors of rank 0
    common |= {} if engines is None else engines.attach(places)
    reports = [
        host.run.options(num_returns="streaming").remote(function, dict(arguments), common | variables, str(Path.cwd()))
        for host, variables in zip(hosts, rank_variables(places), strict=True)
    ]
    return RankGroup(hosts=hosts, places=places, reports=reports, bundles=own)


def _not_started(error: Exception, spec: RayPlacement) -> UserError:
    """What an actor's own error, such as an import that fails there, or one of Ray's says to the user."""
    from ray.exceptions import GetTimeoutError

    if isinstance(error, GetTimeoutError):
        late = f"the ranks did not start within placement.start_timeout={spec.start_timeout:g} s"
        return UserError(late, remedy="see `ray status` and Ray's logs of the nodes in /tmp/ray/session_latest/logs")
    lines = [line.strip() for line in str(error).splitlines()]
    missing = next((line for line in lines if line.startswith(("ModuleNotFoundError", "ImportError"))), "")
    remedy = "install the same packages on all nodes" if missing else ""
    return UserError(f"a rank could not be started: {missing or first_line_of(error)}", remedy=remedy)


def rank_order(places: Sequence[ActorPlace], driver: str) -> list[int]:
    """The indices of the actors by rank: node by node, first the node of this process, where the run folder is."""
    sizes = Counter(place.node for place in places)
    return sorted(
        range(len(places)),
        key=lambda index: (places[index].node != driver, -sizes[places[index].node], places[index].node, index),
    )


def rank_variables(places: Sequence[ActorPlace]) -> list[dict[str, str]]:
    """The variables that torchrun would set for each rank. Each rank sees the devices of all ranks of its node, in the
    order of the local ranks: it computes on device LOCAL_RANK, and reaches the devices of its neighbours directly."""
    nodes = list(dict.fromkeys(place.node for place in places))
    variables = []
    for rank, place in enumerate(places):
        neighbours = [other for other, there in enumerate(places) if there.node == place.node]
        devices = [gpu for other in neighbours for gpu in places[other].gpus]
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(neighbours.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(neighbours)),
            "GROUP_RANK": str(nodes.index(place.node)),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(places[0].port),
            STARTED_BY: "ray",
        }
        variables.append(own | ({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}))
    return variables
