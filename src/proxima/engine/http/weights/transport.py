"""Ways to send weights to servers: `WeightTransport`, and the choice among its kinds.

To write another one: (1) a class that has the members of `WeightTransport`, in a file here or in a package of yours;
`StagedTransport` of `weight_folders.py` has most of those of a transport whose copies outlive an optimizer step,
`StreamTransport` of `stream.py` those of one that reads the trainer's own memory; (2) its name in `engine.transfer`: a
line in `TRANSPORTS`, or `my_pkg.my_module:MyTransport`; (3) if the server has other calls for it, they go into its
dialect (`to_vllm.py`, `to_sglang.py`), (4) and what runs inside a vLLM server into `in_server/proxima_vllm_worker.py`,
or into a class of your own that it imports, see `UpdateInfo` there.

A transport moves bytes and proves nothing. `sync.py` does the rest around it: it pauses and resumes the server, empties
its caches, and compares its log-probs with the trainer's. It relies on this:

- `prepare` reads the model's parameters, and is called in the thread for tensor work.
- `push` is called in the engine's event loop and must not block it; the server is paused. Either the server has all of
  the weights and reports their label, or `push` raises. A server that keeps a part of them must say so by a label that
  `is_incomplete`; nothing then resumes it before it has whole weights again.
- Each wait ends by itself, after `NewWeights.seconds` or earlier. A `push` may be cancelled at any await.
- The first weights are followed by a perturbed copy of them. It is pushed to every server that is new, at any time
  until `close`. A transport that `keeps_copies` still has it then; another one is given a newer copy.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

from proxima.data import FieldError, UserError
from proxima.data.kinds import class_of
from proxima.engine.http.dialect import NewWeights, ServerFacts
from proxima.engine.http.replica import Replica
from proxima.engine.http.run_labels import sends_whole_weights
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.http.weights import TRANSPORTS
from proxima.engine.protocol import EngineSetup, WeightUpdate

SEEN = "set engine.weight_folder to a folder that the trainer and all servers see"
UNSEEN = "servers on other machines do not see a folder of this one"


@dataclass(frozen=True)
class Receivers:
    """The servers that are to receive weights, as a transport is asked about them.

    Args:
        facts: of each.
        spec: their settings.
        shared: they and the trainer take turns on the same devices.
        adapter_rank: of the run's adapters; 0: none.
        elsewhere: some are on other machines, whatever the addresses that are known now.
    """

    facts: Sequence[ServerFacts]
    spec: ServerSettings
    shared: bool = False
    adapter_rank: int = 0
    elsewhere: bool = False

    @property
    def on_this_machine(self) -> bool:
        """True if all of them are on this machine, those that may join included."""
        return self.spec.on_this_machine and not self.elsewhere

    @property
    def read_our_files(self) -> bool:
        """True if they see what this process writes: in `weight_folder`, or because they are on this machine."""
        if self.spec.weight_folder is not None or self.on_this_machine:
            return True
        if self.elsewhere:
            return False
        try:
            urls = self.spec.urls
        except FieldError:  # a file that can't be read, which is said elsewhere
            return True
        return all(map(is_this_machine, urls))

    @property
    def on_gpus(self) -> bool:
        """True if all of them compute on GPUs."""
        return bool(self.facts) and all(server.device == "cuda" for server in self.facts)

    def offer(self, kind: str) -> bool:
        """True if every server can take weights in this way."""
        return all(kind in server.transfers for server in self.facts)


def choose_transport(servers: Receivers) -> tuple[str, str]:
    """The kind of transport for these servers, and the reason: the recipe's, or the cheapest of those that reach them.

    Raises:
        FieldError: the one that the recipe names does not reach them.
    """
    spec = servers.spec
    if spec.adapters_only and servers.adapter_rank:
        for server in servers.facts:
            check_adapters(server, servers.adapter_rank, server.server)
        if not servers.read_our_files:
            raise FieldError("weight_folder", None, f"is needed with adapters_only: {UNSEEN}", remedy=SEEN)
        return "adapters", "set by engine.adapters_only"
    able = ways_of(servers)
    if spec.transfer != "auto":
        problem = transport_kind(spec.transfer).unreached(servers)
        if problem is not None:
            raise FieldError("transfer", spec.transfer, problem, remedy=_other_ways(spec.transfer, able))
        return spec.transfer, "set by engine.transfer"
    if spec.weight_folder is not None:
        return "folder", "engine.weight_folder is set"
    if not able:
        raise FieldError("weight_folder", None, f"is needed: {UNSEEN}, and they offer no other way", remedy=SEEN)
    return able[0], transport_kind(able[0]).reason(servers)


def _other_ways(transfer: str, able: Sequence[str]) -> str:
    """The remedy for a way that does not reach the servers; `able` do."""
    if able:
        others = f"use {', '.join(sorted(able))} or auto"
        if transfer == "folder":
            return f"{others}, or {SEEN}"
        return others
    if transfer == "folder":
        return SEEN
    return f"use folder, and {SEEN}"


def transport_kind(name: str) -> "type[WeightTransport]":
    """The class of a kind: of the table, or `package.module:Class`."""
    if name in TRANSPORTS:
        return TRANSPORTS[name]
    return class_of(name)


def ways_of(servers: Receivers) -> list[str]:
    """The kinds that reach these servers, the cheapest first; adapters alone are asked for by a field of their own."""
    able = [kind for kind in TRANSPORTS if kind != "adapters" and transport_kind(kind).unreached(servers) is None]
    return sorted(able, key=lambda kind: transport_kind(kind).cost(servers))


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
    if sends_whole_weights(label):
        reason = f"{replica.url} has weights of an earlier run ({label}) in place of the base of the adapters"
        raise UserError(reason, remedy="start it again, or set engine.adapters_only=false")


class PushRound:
    """Replicas that are pushed the same weights at the same time, for a transport that sends to all of them at once.

    copies: the round of those among them that are pushed the perturbed copy before.
    """

    def __init__(self, replicas: Sequence[Replica], *, of_copies: bool = False) -> None:
        if of_copies:
            self.copies = self
        else:
            self.copies = PushRound(replicas, of_copies=True)
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
    """A way to send weights to servers; see the top of this file for what is expected of it.

    sends: `weights`, or `adapters` alone.
    keeps_copies: what `prepare` returns outlives an optimizer step, and the perturbed copy is kept until `close`.
    """

    sends: ClassVar[str] = "weights"
    keeps_copies: ClassVar[bool] = True

    def __init__(self, spec: ServerSettings, setup: EngineSetup) -> None: ...

    @classmethod
    def unreached(cls, servers: Receivers) -> str | None:
        """Why it can't send weights to these servers, as the end of a sentence about `engine.transfer`; None: it can,
        as far as their facts tell."""
        ...

    @classmethod
    def cost(cls, servers: Receivers) -> float:
        """Seconds for each GB of weights, roughly: `auto` takes the cheapest way."""
        ...

    @classmethod
    def reason(cls, servers: Receivers) -> str:
        """Why it is the cheapest of those that reach them, for the user."""
        ...

    def prepare(
        self, update: WeightUpdate, label: str, dtype: str | None, amounts: Sequence[float] | None = None
    ) -> NewWeights:
        """Get the model's weights ready to be pushed, with adapters merged and tied ones once.

        Args:
            label: the servers' name for them, which no other version has had.
            dtype: of what is sent, by the servers' name: `bfloat16` and the like; None: unchanged.
            amounts: by which the weights are perturbed at this moment, see `perturbed_weights`; None: they are not.

        Raises:
            UserError: there is no room for the copy, or the dtype is not supported.
        """
        ...

    async def push(self, replica: Replica, weights: Any, push_round: PushRound | None = None) -> None:
        """Load weights into a paused server, and tell it their label.

        Args:
            weights: what `prepare` returned.
            push_round: the replicas that are pushed these weights now, this one among them; None: this one alone.

        Raises:
            ServerError: a call failed, or the deadline has passed.
            OutdatedError: the trainer no longer has these weights.
        """
        ...

    async def check(self, replicas: Sequence[Replica], update: WeightUpdate) -> None:
        """Called before the first `prepare`, with the servers that will get these weights.

        Raises:
            UserError: weights can't be sent to them in this way.
        """
        ...

    async def close(self) -> None:
        """Remove all copies."""
        ...
