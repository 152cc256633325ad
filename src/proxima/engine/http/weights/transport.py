"""Ways to send weights to servers: `WeightTransport`, and the table of its kinds.

To write another one: (1) a file with a class that has `prepare`, `push` and `close`, of which `StagedTransport` of
`folder.py` has the first and the last; (2) a line in `TRANSPORTS`; (3) if the server has other calls for it, they
go into its dialect (`vllm.py`, `sglang.py`), (4) and what runs inside a vLLM server into
`in_server/proxima_vllm_worker.py`. `folder.py` has an example.

A transport moves bytes and proves nothing. `sync.py` does the rest around it: it pauses and resumes the server,
empties its caches, and compares its log-probs with the trainer's. It relies on this:

- `prepare` reads the model's parameters, and is called in the thread for tensor work. It takes a copy that outlives the
  next optimizer step: a server that returns is sent the newest weights while the trainer is in the middle of an update.
  No GPU memory is needed for it; the copy may be in host memory or on a disk.
- `push` is called in the engine's event loop and must not block it; the server is paused. Either the server has all of
  the weights and reports their label, or `push` raises. A server that keeps a part of them must say so by a label that
  `is_incomplete`; nothing then resumes it before it has whole weights again.
- Each wait ends by itself, after `WeightHandover.seconds` or earlier. A `push` may be cancelled at any await.
- The first weights are followed by a perturbed copy of them with `kept=True`. It is pushed to every server that is new,
  at any time until `close`.
"""

import asyncio
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

from torch import nn

from proxima.data import FieldError, UserError
from proxima.data.kinds import Kinds
from proxima.engine.http.dialect import INCOMPLETE, ServerFacts, WeightHandover
from proxima.engine.http.replica import Replica
from proxima.engine.http.server_settings import ServerSettings

TRANSPORTS = Kinds(
    {
        "adapters": "proxima.engine.http.weights.adapters:AdapterTransport",
        "folder": "proxima.engine.http.weights.folder:FolderTransport",
        "group": "proxima.engine.http.weights.group:GroupTransport",
        "ipc": "proxima.engine.http.weights.ipc:IpcTransport",
    }
)

ADAPTED = ".adapters"  # at the end of a run's labels if it sends adapters alone: the server still has its own base
WHOLE = re.compile(rf"({INCOMPLETE})?[0-9a-f]{{8}}\.\d+\.v\d+(-perturbed)?")  # a label of a run that sends all weights


def choose_transport(spec: ServerSettings, facts: Sequence[ServerFacts], adapter_rank: int = 0) -> tuple[str, str]:
    """The kind of transport for these servers, and the reason.

    Args:
        adapter_rank: of the run's adapters; 0: none.

    Raises:
        FieldError: not all servers have the one that the recipe names.
    """
    if spec.adapters_only and adapter_rank:
        for server in facts:
            check_adapters(server, adapter_rank, server.server)
        return "adapters", "set by engine.adapters_only"
    offered = set(TRANSPORTS).intersection(*(server.transfers for server in facts))
    local = spec.on_this_machine
    if spec.transfer != "auto":
        if spec.transfer not in offered:
            reason, others = "is not offered by every server", ", ".join(sorted(offered - {"adapters"}))
            raise FieldError("transfer", spec.transfer, reason, remedy=f"use {others} or auto")
        if spec.transfer == "ipc" and not local:
            reason = "needs servers on this machine"
            raise FieldError("transfer", spec.transfer, reason, remedy="use group, folder or auto")
        return spec.transfer, "set by engine.transfer"
    if spec.weight_folder is not None:
        return "folder", "engine.weight_folder is set"
    if local:  # faster than a group on CPUs
        return "folder", "the servers are on this machine"
    if "group" in offered:
        where = "may be" if spec.url_file is not None else "are"
        return "group", f"the servers {where} on other machines, and all of them can join a group"
    return "folder", "not every server can join a group"


def is_this_machine(url: str) -> bool:
    """True if the server's address is one of this machine's. Blocks while a name is looked up."""
    parts = urlsplit(url)
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((parts.hostname, parts.port or 80))
        return bool(probe.getsockname()[0] == probe.getpeername()[0])
    return False


def check_adapters(facts: ServerFacts, rank: int, server: str) -> None:
    """Raise FieldError unless a server loads adapters of this rank; `server` is its name in the message."""
    remedy = "start it with proxima engine serve RECIPE (vLLM: --enable-lora --max-loras 1 --max-lora-rank,"
    remedy += " and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1), or set adapters_only=false"
    if "adapters" not in facts.transfers:
        raise FieldError("adapters_only", True, f"is not possible: {server} loads no adapters", remedy=remedy)
    if rank > facts.adapter_rank:
        reason = f"is not possible: {server} loads adapters of rank {facts.adapter_rank}, and model.lora.rank is {rank}"
        raise FieldError("adapters_only", True, reason, remedy=remedy)


async def check_served_base(replica: Replica) -> None:
    """Raise UserError if an earlier run has sent this server whole weights: adapters belong to the base that it was
    started with. The probe finds another base only if that moves the log-probs by more than rounding does."""
    label = (await replica.dialect.health(replica.client, replica.facts)).weight_version
    if label is not None and WHOLE.fullmatch(label):
        reason = f"{replica.url} has weights of an earlier run ({label}) in place of the base of the adapters"
        raise UserError(reason, remedy="start it again, or set engine.adapters_only=false")


class PushRound:
    """Replicas that are pushed the same weights at the same time, for a transport that sends to all of them at once."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.members = list[Replica]()  # those that have arrived
        self.outcome: asyncio.Task[Any] | None = None  # for the transport: what they all wait for
        self._missing = set(replicas)
        self._complete = asyncio.Event()

    async def arrive(self, replica: Replica) -> None:
        """Return when every replica has arrived or left."""
        if replica in self._missing:
            self.members.append(replica)
            self.leave(replica)
        await self._complete.wait()

    def leave(self, replica: Replica) -> None:
        """Do not wait for this replica any longer. May be called twice."""
        self._missing.discard(replica)
        if not self._missing:
            self._complete.set()


class WeightTransport(Protocol):
    """A way to send weights to servers; see the top of this file for what is expected of it. It is built with the
    `ServerSettings` of the recipe and the `EngineSetup`."""

    def prepare(self, model: nn.Module, version: int, label: str, dtype: str | None, *, kept: bool) -> WeightHandover:
        """Copy the model's weights, with adapters merged and tied ones once, so that they can be pushed.

        Args:
            label: the servers' name for them, which no other version has had.
            dtype: of the copy, by the servers' name: `bfloat16` and the like; None: unchanged.
            kept: keep the copy until `close`. Others are kept at least until the next one has been pushed.

        Raises:
            UserError: there is no room for the copy, or the dtype is not supported.
        """
        ...

    async def push(self, replica: Replica, weights: WeightHandover, push_round: PushRound | None = None) -> None:
        """Load weights into a paused server, and tell it their label.

        Args:
            push_round: the replicas that are pushed these weights now, this one among them; None: this one alone.

        Raises:
            ServerError: a call failed, or the deadline has passed.
        """
        ...

    async def check(self, replicas: Sequence[Replica]) -> None:
        """Called before the first `prepare`, with the servers that will get these weights.

        Raises:
            UserError: weights can't be sent to them in this way.
        """
        ...

    async def close(self) -> None:
        """Remove all copies."""
        ...
