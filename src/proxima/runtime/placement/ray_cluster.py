"""The Ray cluster of a run: connecting to it or starting one, and checking that it has the devices. Every failure is
one line that the user can act on."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from proxima.data import FieldError, UserError

if TYPE_CHECKING:
    from proxima.config.sections.ranks_section import RayPlacement  # imports torch, which no reward actor needs

ADDRESS = "RAY_ADDRESS"


@contextmanager
def connected(spec: "RayPlacement") -> Iterator[None]:
    """Make this process a driver of the cluster within the block; a cluster that is started here ends with the block.

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
    local: dict[str, Any] = {} if address else {"include_dashboard": False}
    try:
        ray.init(address=address or "local", logging_level=logging.ERROR, log_to_driver=False, **local)
    except Exception as error:  # Ray raises whatever its parts raise
        reason = first_line_of(error)
        if address is None:
            raise UserError(f"no Ray cluster could be started on this machine: {reason}") from None
        token = "; all its nodes need one token, ~/.ray/auth_token or RAY_AUTH_MODE=disabled"
        hint = token if "auth" in reason.lower() or "token" in reason.lower() else ""
        raise FieldError("placement.address", address, f"refuses this process: {reason}{hint}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raise if nothing listens at the address: Ray itself would try for a minute and end the process."""
    host, _, port = address.rpartition(":")
    form = "is HOST:PORT of the cluster's head, as `ray start --head` prints it"
    if "://" in address or not port.isdigit() or not host:
        raise FieldError("placement.address", address, form)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        remedy = f"start the cluster, or correct the address or {ADDRESS}; null starts one on this machine"
        raise FieldError(
            "placement.address", address, f"has no cluster: {error.strerror or error}", remedy=remedy
        ) from (None)


def first_line_of(error: BaseException) -> str:
    """The first line of a Ray error, without the process states below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".:")


def bundle_of(spec: "RayPlacement") -> dict[str, float]:
    """The resources that one rank reserves; with `colocate`, a server and its ranks."""
    cpus = spec.ranks // spec.bundles * spec.cpus_per_rank + (spec.cpus_per_engine if spec.colocate else 0)
    return {"CPU": cpus} | ({"GPU": spec.gpus_of_ranks} if spec.gpus_of_ranks else {})


def fitted(spec: "RayPlacement", say: Callable[[str], None]) -> "RayPlacement":
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
    fits = [min(int(node.get(name, 0) // amount) for name, amount in bundle.items()) for node in nodes]
    ranks = {"STRICT_PACK": max(fits, default=0), "STRICT_SPREAD": sum(fit > 0 for fit in fits)}
    possible = ranks.get(spec.strategy, sum(fits))
    if possible >= spec.bundles:
        return spec
    asked = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    totals = {name: sum(node.get(name, 0) for node in nodes) for name in bundle}
    there = " and ".join(f"{amount:g} {name}" for name, amount in totals.items())
    plural = "s" if len(nodes) != 1 else ""
    bound = (
        f"asks for {asked} each, with {spec.strategy}, and the cluster has {there} on {len(nodes)} node{plural}, "
        f"room for {possible}"
    )
    no_gpu = spec.gpus_per_rank and not totals["GPU"]
    remedy = "set gpus_per_rank=0 to compute on CPUs, or add nodes" if no_gpu else "lower it, or add nodes"
    name = "engines" if spec.colocate else "ranks"
    raise FieldError(f"placement.{name}", spec.bundles, bound, remedy=remedy)
