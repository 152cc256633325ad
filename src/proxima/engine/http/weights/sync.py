"""Weight sync: each server gets the new weights and is verified by a probe, whichever way they are sent.

The way is a `WeightTransport`. The proof that the weights arrived is here, and is the same for all of them.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

import torch

from proxima.data import UserError
from proxima.data.columns import Floats
from proxima.engine.http.dialect import NewWeights, ServerFacts, WrittenTokens
from proxima.engine.http.replica import Replica
from proxima.engine.http.run_labels import ADAPTED
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.http.weights.probe import (
    Bound,
    bound_of,
    check_distance,
    copy_bound,
    first_compared,
    precision_of,
    probe_tokens,
    rounding,
    strengths,
    trainer_log_prob,
)
from proxima.engine.http.weights.stream import check_held
from proxima.engine.http.weights.transport import (
    PushRound,
    Receivers,
    WeightTransport,
    check_served_base,
    choose_transport,
    transport_kind,
    ways_of,
)
from proxima.engine.protocol import EngineSetup, ServerError, WeightUpdate
from proxima.model.adapters.lora import adapter_names
from proxima.model.chat.encode import image_store_of
from proxima.model.images.image_store import ImageStore
from proxima.model.parallel.lending import lent, perturbing

T = TypeVar("T")
Report = dict[str, float]  # of a sync to one replica: `seconds`, `bytes`, `probe_mean` and `probe_max` (nats), …


@dataclass(frozen=True)
class StagedWeights:
    """Weights that are ready for servers, and the trainer's log-probs under them.

    Args:
        handover: what the transport pushes, with the servers' name for them.
        update: of the trainer, with its model.
        dtype: of what is pushed, by the servers' name; None: the trainer's.
        expected: [T] log-probs of the probe's tokens.
        precision: in which they were computed.
        rounding: how far bfloat16 moves those of the perturbed copy; None: not known.
    """

    handover: NewWeights
    update: WeightUpdate
    dtype: str | None
    expected: Floats
    precision: torch.dtype = torch.float32
    rounding: Bound | None = None


class WeightSync:
    """Sends each replica its weights, and verifies that they arrived. Called from the engine's own loop.

    Before its first weights, and before the first ones after a restart, a server gets a perturbed copy. It already has
    the initial weights, so a part of the model that it fails to load would go unnoticed for a long time: the first real
    weights hardly differ. A transport that keeps copies keeps that of the first weights until `close`, because servers
    may return at any moment, when the trainer's model may be in the middle of an update; of others it is made from the
    newest weights, between updates.
    """

    def __init__(self, spec: ServerSettings, setup: EngineSetup) -> None:
        self.spec = spec
        self.setup = setup
        self.kind = "folder"  # until `choose`
        self.transport: WeightTransport = transport_kind(self.kind)(spec, setup)
        self._tokens = probe_tokens(setup.tokenizer, spec.probe_tokens, setup.max_length)
        self._images: ImageStore | None = image_store_of(setup.tokenizer)
        self._shown = WrittenTokens.of(self._tokens, setup.tokenizer)
        self.newest: StagedWeights | None = None  # what `push` sends
        self._perturbed: StagedWeights | None = None
        self._amounts: list[float] | None = None  # by which copies are perturbed
        self._perturbing = asyncio.Lock()
        self._proven = set[str]()  # URLs of replicas that loaded the perturbed copy and still have one of our labels
        self._labels = set[str]()

    def choose(self, facts: Sequence[ServerFacts]) -> str:
        """Choose the transport for these servers. Returns a line for the user.

        Raises:
            FieldError: the one that the recipe names does not reach all of them.
        """
        self.kind, reason = choose_transport(self._receivers(facts))
        self.transport = transport_kind(self.kind)(self.spec, self.setup)
        # outside training, the model here is not the one that is trained
        if self.spec.adapters_only and self.transport.sends != "adapters":
            reason = f"{reason}; engine.adapters_only has no effect outside training"
        return f"engine: new weights are sent by {self.kind}: {reason}"

    def _receivers(self, facts: Sequence[ServerFacts]) -> Receivers:
        return Receivers(facts, self.spec, self.setup.shares_devices, self.setup.adapter_rank)

    def label_of(self, run: str, number: int, version: int) -> str:
        """The servers' name for the weights of a run's publication `number`; see `run_labels`."""
        label = f"{run}.{number}.v{version}"
        if self.transport.sends == "adapters":
            return label + ADAPTED
        return label

    async def check(self, replicas: Sequence[Replica], update: WeightUpdate) -> str | None:
        """Before the first weights, check that they can be sent as chosen to these servers. If they can't, and `auto`
        chose, take the cheapest of the other ways. Returns a line for the user if that has changed.

        Raises:
            UserError: there is no way.
        """
        try:
            await self.transport.check(replicas, update)
        except UserError as error:
            if self.spec.transfer != "auto":
                message = f"engine.transfer={self.spec.transfer!r} is not possible: {error.reason}"
                raise UserError(message, remedy=error.remedy) from error
            first = self.kind
            await self.transport.close()
            if not await self._take_another_way(replicas, update, first):
                message = f"engine: weights can't be sent: {error.reason}"
                raise UserError(message, remedy=error.remedy) from error
            return f"engine: new weights are sent by {self.kind}: {error.reason}"
        return None

    async def _take_another_way(self, replicas: Sequence[Replica], update: WeightUpdate, first: str) -> bool:
        """Take the cheapest of the other ways that `auto` knows, if one is open; `first` is not."""
        servers = self._receivers([replica.facts for replica in replicas])
        for kind in await asyncio.to_thread(ways_of, servers):
            if kind == first:
                continue
            self.kind = kind
            self.transport = transport_kind(kind)(self.spec, self.setup)
            try:
                await self.transport.check(replicas, update)
            except UserError:
                await self.transport.close()
                continue
            return True
        return False

    async def prepare(self, update: WeightUpdate, label: str, dtype: str | None) -> StagedWeights:
        """Copy the weights for the transport, and compute the log-probs that the probe expects. Until `newest` is set
        to the result, servers are sent the former weights.

        Args:
            dtype: of the servers; None: not reported.
        """
        staged = await self._compute(self._stage, update, label, dtype)
        if self._perturbed is None:
            self._perturbed = await self._compute(self._stage_perturbed, update, f"{label}-perturbed", dtype)
        return staged

    async def push(self, replica: Replica, push_round: PushRound | None = None) -> Report:
        """Load the weights, reset the prefix cache, resume and probe; for a new server, first with the perturbed copy.
        The replica is paused and keeps its completions, if any; on return the server may be paused or not.

        Args:
            push_round: the replicas that are pushed the newest weights now, if it is not this one alone.

        Raises:
            ServerError: a call failed; the replica is ejected, and gets the weights before it returns.
            UserError: it does not compute with them; the replica is ejected too, and the run ends if no other has them.
        """
        staged = self.newest
        start = monotonic()
        assert staged is not None
        problem = self.transport.unreached(self._receivers([replica.facts]))
        if problem is not None:  # it was not there when this was chosen
            reason = f"engine: {replica.url} can't be sent weights by {self.kind}, as the others are: it {problem}"
            raise UserError(reason, remedy="start it with the same options as the others")
        metrics = Report()
        copy = None
        if await self._is_new(replica):
            copy = await self._copy(staged)
        if copy is not None and self.transport.sends == "adapters":
            await check_served_base(replica)
        try:
            if copy is not None:
                metrics |= await self._prove(replica, copy, push_round)
                await replica.dialect.pause(replica.client, replica.facts, "keep")
            elif push_round is not None:
                push_round.copies.leave(replica)
            sending = monotonic()
            await self._load_weights(replica, staged, push_round)
            metrics["send_seconds"] = monotonic() - sending
        except BaseException:
            if copy is not None:
                await self._undo(replica, staged)
            raise
        scoring = monotonic()
        scores = await self._score(replica)
        metrics["probe_seconds"] = monotonic() - scoring
        try:
            bound = bound_of(replica.facts, self.spec.probe_bound, staged.precision)
            version = f"version {staged.handover.version}"
            metrics |= check_distance(replica.url, version, staged.expected, scores, bound)
        except UserError:
            self._proven.discard(replica.url)  # it must pass the perturbed copy again before it returns
            raise
        return metrics | {"bytes": staged.handover.size, "seconds": monotonic() - start}

    def forget(self, replica: Replica) -> None:
        """Treat a server as new from now on: it has left, and others may change its weights."""
        self._proven.discard(replica.url)

    async def close(self) -> None:
        """Remove the copies of the weights."""
        await self.transport.close()

    async def _is_new(self, replica: Replica) -> bool:
        """Return True if the server does not have our weights, for example after a restart."""
        if replica.url not in self._proven:
            return True
        health = await replica.dialect.health(replica.client, replica.facts)
        is_ours = health.weight_version is None or health.weight_version in self._labels
        if not is_ours:
            self._proven.discard(replica.url)
        return not is_ours

    async def _copy(self, staged: StagedWeights) -> StagedWeights:
        """The perturbed copy; where the transport keeps none, of the weights that come after it.

        Raises:
            OutdatedError: the trainer no longer has these.
        """
        async with self._perturbing:
            copy = self._perturbed
            assert copy is not None
            if not self.transport.keeps_copies and copy.update is not staged.update:
                label = f"{staged.handover.label}-perturbed"
                copy = await self._compute(self._stage_perturbed, staged.update, label, staged.dtype)
                self._perturbed = copy
        return copy

    async def _prove(self, replica: Replica, copy: StagedWeights, push_round: PushRound | None) -> Report:
        """Load the perturbed copy, and verify that the server computes with all of it."""
        copies = None if push_round is None else push_round.copies
        await self._load_weights(replica, copy, copies)
        scores = await self._score(replica)
        bound = copy_bound(replica.facts, self.spec.probe_bound, copy.precision, rounds=copy.rounding)
        metrics = check_distance(replica.url, "the perturbed copy", copy.expected, scores, bound)
        self._proven.add(replica.url)
        return {f"perturbed_{name.removeprefix('probe_')}": value for name, value in metrics.items()}

    async def _undo(self, replica: Replica, staged: StagedWeights) -> None:
        """Remove the perturbed copy from a server that others may use: it gets the real weights, or stays paused."""
        self._proven.discard(replica.url)
        with suppress(ServerError, UserError):
            await replica.dialect.pause(replica.client, replica.facts, "keep")
            try:
                await self._load_weights(replica, staged)
            except (ServerError, UserError):
                await replica.dialect.pause(replica.client, replica.facts, "keep")

    async def _load_weights(
        self, replica: Replica, weights: StagedWeights, push_round: PushRound | None = None
    ) -> None:
        """Load weights, reset the prefix cache, and resume the server: a paused one answers no probe."""
        await self.transport.push(replica, weights.handover, push_round)
        await replica.take_cache()
        dialect = replica.dialect
        client = replica.client
        facts = replica.facts
        self._labels.add(weights.handover.label)
        interrupt = self.spec.interrupt
        # kept completions keep their cache, which has another salt; but a server that returns may have cached under the
        # salt of these weights what it computed with those of another run
        again = push_round is None
        if again or interrupt != "keep" or not facts.keeps_kv:
            await dialect.reset_prefix_cache(client, facts, running=again or interrupt == "recompute")
        if self._images is not None:
            await dialect.forget_images(client, facts)
        await dialect.resume(client, facts)

    async def _score(self, replica: Replica) -> Floats:
        first = first_compared(self._tokens)
        return await replica.dialect.score(replica.client, replica.facts, self._shown, first)

    async def _compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work in the thread for tensor work, between the trainer's updates."""
        if self.setup.compute is not None and self.setup.compute.serving:
            return await self.setup.compute.run(work, *arguments)
        return await asyncio.to_thread(work, *arguments)

    def _stage(self, update: WeightUpdate, label: str, dtype: str | None) -> StagedWeights:
        module = update.module
        with lent(module):
            handover = self.transport.prepare(update, label, dtype)
            expected = trainer_log_prob(module, self._tokens, self._images)
        return StagedWeights(handover, update, dtype, expected, precision_of(module))

    def _stage_perturbed(self, update: WeightUpdate, label: str, dtype: str | None) -> StagedWeights:
        module = update.module
        check_held(update)
        with lent(module):
            if self._amounts is None:
                names = None
                if self.transport.sends == "adapters":
                    names = adapter_names(module)
                self._amounts = strengths(module, self._tokens, self._images, names)
            with perturbing(module, self._amounts):
                handover = self.transport.prepare(update, label, dtype, self._amounts)
                expected = trainer_log_prob(module, self._tokens, self._images)
                bound = rounding(module, self._tokens, expected, self._images)
        return StagedWeights(handover, update, dtype, expected, precision_of(module), rounding=bound)


def sync_figures(reports: Sequence[Report]) -> dict[str, float]:
    """Combine the figures of several replicas: the largest of each, and the number of replicas. Empty without
    reports."""
    if not reports:
        return {}
    figures = dict[str, float]()
    for report in reports:
        for name, value in report.items():
            figures[name] = max(figures.get(name, value), value)
    return figures | {"replicas": len(reports)}
