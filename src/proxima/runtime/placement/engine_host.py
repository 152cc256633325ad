"""The actor of an engine: starts a server on its node, with the devices of its bundle, and reports when the server is
given up. The server stops with the actor, however the actor ends (`engine/serve/guardian.py`)."""

import socket
from dataclasses import dataclass, replace
from pathlib import Path

from proxima.engine.serve import Serve, Servers, start_servers


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The settings with which every server of a run is started; see `start_servers`.

    Args:
        shared: True if new weights are written to a folder that all nodes see.
        log: file for the first server's output, on its node; the files of the others have their number in the name.
    """

    kind: str
    serve: Serve
    model: str
    max_length: int | None = None
    quantization: str | None = None
    sampling_mask: bool = False
    routed_experts: bool = False
    shared: bool = False
    log: Path | None = None


@dataclass(frozen=True, kw_only=True)
class EnginePlace:
    """The place of a server: the `address` and the name `host` of its node. `gpus` are the ids of its devices."""

    node: str
    host: str
    address: str
    port: int
    gpus: tuple[str, ...] = ()


class EngineHost:
    """An actor whose calls run in threads: `ray.remote(EngineHost)` with `max_concurrency`."""

    def __init__(self) -> None:
        self.servers: Servers | None = None

    def start(self, plan: EnginePlan, number: int, key: str, *, remote: bool) -> EnginePlace:
        """Start the server; returns when it answers.

        Args:
            key: the key that its clients must send.
            remote: True if clients are on other nodes too.

        Raises:
            UserError: the server did not start.
        """
        import ray

        more = ("--host", "0.0.0.0") if remote else ()  # the last value of an argument wins
        log = plan.log
        if log is not None and number:
            log = log.with_name(f"{log.stem}.{number}{log.suffix}")
        self.servers = start_servers(
            plan.kind,
            replace(plan.serve, replicas=1, arguments=(*plan.serve.arguments, *more)),
            model=plan.model,
            max_length=plan.max_length,
            quantization=plan.quantization,
            sampling_mask=plan.sampling_mask,
            routed_experts=plan.routed_experts,
            key=key,
            log=log,
        )
        address = str(ray.util.get_node_ip_address()) if remote else "127.0.0.1"
        port = int(self.servers.urls[0].rpartition(":")[2])
        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        return EnginePlace(node=context.get_node_id(), host=socket.gethostname(), address=address, port=port, gpus=gpus)

    def failure(self) -> str:
        """Wait until the server is given up, and return the reason."""
        assert self.servers is not None
        return str(self.servers.wait())
