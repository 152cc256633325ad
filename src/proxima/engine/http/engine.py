"""The engine over one or many servers, and the spec that all engines over HTTP derive from."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, replace

from proxima.data import UserError, require
from proxima.data.columns import Floats
from proxima.data.errors import within
from proxima.data.flow import Completion
from proxima.engine.event_loop_thread import Arrivals, EventLoopThread
from proxima.engine.http.client import Address
from proxima.engine.http.dialect import ServerFacts
from proxima.engine.http.generation_job import CompletionRules, GenerationJob
from proxima.engine.http.replica import Replica
from proxima.engine.http.replica_keeper import ReplicaKeeper
from proxima.engine.http.replica_pool import ReplicaPool
from proxima.engine.http.run_labels import new_run
from proxima.engine.http.server_checks import (
    capabilities_of,
    check_facts,
    check_servers_of,
    introduce,
    longest_sequence,
)
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.http.weights.sync import WeightSync
from proxima.engine.http.weights.transport import Receivers, choose_transport
from proxima.engine.protocol import (
    Capabilities,
    EngineRequirements,
    EngineSetup,
    Health,
    InFlight,
    PauseMode,
    Request,
    ScoreRequest,
    WeightUpdate,
)
from proxima.engine.serve.servers import Servers, check_serve, start_servers
from proxima.system.atomic_files import check_writable

# counts of `health().detail["replicas"]`; `lost` are completions whose answer was invalid
COUNTED = ("ejected", "returned", "joined", "left", "retried", "completed", "lost", "tokens_lost")


class HttpEngine:
    """See `Engine` for the protocol. All communication with the servers runs in an event loop in a dedicated thread:
    methods may be called from any other, and tokens are read while the caller computes. `close` stops it.

    Args:
        spec: the settings.
        rules: what a completion of the model can be; `max_length` and `log_probs` are replaced by what the servers say.
        sync: pushes new weights to the servers.
        servers: servers started for this engine, which it stops on `close`; None: the running servers of the spec.

    Raises:
        UserError: no server can be reached, or they differ from each other, or they return no log-probs.
    """

    def __init__(
        self, spec: ServerSettings, rules: CompletionRules, sync: WeightSync, servers: Servers | None = None
    ) -> None:
        self.spec = spec
        self._sync = sync
        self._servers = servers
        self._tag = secrets.token_hex(4)
        self._loop = EventLoopThread("proxima-servers")
        self._callers: dict[Arrivals[Completion], Sequence[Request]] = {}
        self._replicas: list[Replica] = []
        try:
            self._loop.call(self._connect(rules))
        except BaseException:
            self._loop.close(self._disconnect)
            if servers is not None:
                servers.close()
            raise

    async def _connect(self, rules: CompletionRules) -> None:
        """Ask every server for its facts, and compare them."""
        spec = self.spec
        dialect = self.spec.dialect()
        servers = self._servers
        addresses: Sequence[Address] = spec.addresses
        if servers is not None:
            addresses = [Address(url, token=servers.token) for url in servers.urls]
        replicas = [Replica(address, dialect, spec, self._tag) for address in addresses]
        self._replicas = replicas
        first = await introduce(replicas, rules.tokenizer)
        self.facts = first
        label = next(replica.proof.label for replica in replicas if replica.in_service)
        away = [replica for replica in replicas if not replica.in_service]
        for replica in away:
            replica.facts = first
            replica.proof.set_version(0, label)  # so that it can return before new weights arrive
        if first.log_probs is None:
            raise UserError(f"engine: {first.server} gives no log-probs", remedy="training needs them")
        self.rules = replace(
            rules,
            max_length=min(rules.max_length, first.max_length or rules.max_length),  # no server has less
            log_probs=first.log_probs,
            sampling_mask=spec.sampling_mask and first.sampling_mask,
            routes=rules.routes if spec.routed_experts else None,
            latest_routes=first.latest_routes,
        )
        self._pool = ReplicaPool(replicas, spec)
        self._replicas = self._pool.known
        self._pool.events += [f"engine: {replica.url} is out of service: {replica.status.reason}" for replica in away]
        if first.takes_weights:
            line = self._sync.choose([replica.facts for replica in replicas if replica.in_service])
            self._pool.notes.append(line)
        run = new_run(replica.proof.label for replica in replicas)
        self._keeper = ReplicaKeeper(self._pool, self._sync, first, rules.tokenizer, run, servers)

    @property
    def capabilities(self) -> Capabilities:
        return replace(
            capabilities_of(self.spec, self.facts, plain=True),
            max_length=self.rules.max_length,
            deterministic=self._pool.repeatable,
            reads_lent=True,
            stages=True,
        )

    def check(self, needs: EngineRequirements) -> list[str]:
        """Like `ServerSpec.check`, for servers that the engine has started."""
        return check_facts(self.spec, self.facts, needs, self._pool.replicas[0].url)

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion, None]:
        """Stream completions as they end.

        Raises:
            UserError: a prompt is empty, or leaves no room for one token; the servers report no log-probs for this
                sampling; a completion failed repeatedly; no server is left.
            RuntimeError: the engine is closed.
        """
        arrivals = Arrivals[Completion]()
        jobs = [GenerationJob(request, self.rules, arrivals.put) for request in requests]
        remaining = len(jobs)
        self._callers[arrivals] = requests
        try:
            if self._loop.closed:
                raise RuntimeError("the engine is closed")
            self._loop.submit(self._pool.submit, jobs)
            while remaining:
                completion = await arrivals.get()
                remaining -= 1
                yield completion
        finally:
            del self._callers[arrivals]
            if remaining:
                self._loop.submit(self._pool.withdraw, jobs)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Floats]:
        """See `Engine`.

        Raises:
            UserError: the servers do not score at this temperature; scoring failed repeatedly.
        """
        for request in requests:
            if request.temperature not in (0, 1):
                message = f"engine: {self.facts.server} scores at temperature 1, not at {request.temperature:g}"
                raise UserError(message, remedy="sample at temperature 1, or score with another engine")

        async def work() -> list[Floats]:
            tokenizer = self.rules.tokenizer
            scores = await asyncio.gather(*(self._pool.score(request, tokenizer) for request in requests))
            return list(scores)

        return await self._loop.run(work())

    async def in_flight(self) -> list[InFlight]:
        """See `Engine`. Tokens still in transit from a server are not included."""

        async def work() -> list[InFlight]:
            parts = [job.in_flight() for job in self._pool.jobs if job.length]
            for arrivals, requests in list(self._callers.items()):
                ended = InFlight.not_taken(requests, tuple(arrivals.items))
                parts += [part for part in ended if len(part.tokens)]
            return parts

        return await self._loop.run(work())

    async def stage(self, update: WeightUpdate) -> None:
        """See `StagingEngine`."""
        await asyncio.shield(self._loop.run(self._keeper.stage(update)))

    async def publish(self, update: WeightUpdate) -> None:
        """Push new weights to every server, and verify that they arrived; see `ReplicaKeeper.publish`.

        A server keeps running completions if it can pause them and reports which weights sampled which tokens. On other
        servers they are interrupted, and the rest is requested once the weights are loaded.

        Raises:
            UserError: a server computes with different weights, at the first sync or when no other server has these; no
                server is left.
        """
        # cancelling the caller must not leave a half-published version behind
        await asyncio.shield(self._loop.run(self._keeper.publish(update)))

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._loop.run(self._pool.pause(mode))

    async def resume(self) -> None:
        await self._loop.run(self._pool.resume())

    async def sleep(self) -> None:
        await self._loop.run(self._keeper.sleep())

    async def wake(self) -> None:
        await self._loop.run(self._pool.wake())

    async def abort(self, prompt_uid: int, samples: Collection[int] | None = None) -> None:
        def asked(job: GenerationJob) -> bool:
            if job.request.prompt.uid != prompt_uid:
                return False
            return samples is None or job.request.sample in samples

        await self._loop.run(self._pool.abort(asked))

    async def health(self) -> Health:
        """`detail` has `replicas` (counts since the start), `events` and `notes` (warnings and other lines for the user
        since the start), `log` (where the servers' log is) and `sync` (the figures of the last `publish`)."""

        async def work() -> Health:
            pool = self._pool
            replicas = self._pool.replicas
            counts = {name: pool.counts[name] for name in COUNTED}
            counts |= {"ready": len(pool.serving), "of": len(replicas)}
            return Health(
                ok=bool(pool.serving),
                version=self._keeper.version,
                running=sum(len(replica.running) for replica in pool.known),
                waiting=len(pool.router),
                tokens=sum(replica.received for replica in pool.known),
                detail={
                    "replicas": counts,
                    "events": list(pool.events),
                    "notes": list(pool.notes),
                    "log": "the servers' own logs" if self._servers is None else None,  # None: in the run folder
                    "sync": self._keeper.figures,
                },
            )

        return await self._loop.run(work())

    def stop_waiting(self) -> None:
        """See `proxima.engine.protocol.stop_waiting`. Returns at once."""
        self._loop.submit(self._keeper.stop_waiting)

    async def _disconnect(self) -> None:
        for replica in self._replicas:
            await replica.client.close()

    def close(self) -> None:
        """Abort all running work and disconnect from the servers. May be called twice."""

        async def last() -> None:
            await self._keeper.close()
            closed = RuntimeError("the engine is closed")
            self._pool.give_up(closed)
            for arrivals in list(self._callers):
                arrivals.put(closed)
            await self._sync.close()

        self._loop.close(last, self._disconnect)  # clients are closed last, so that no running task finds one closed
        if self._servers is not None:
            self._servers.close()


@dataclass(frozen=True, kw_only=True)
class ServerSpec(ServerSettings):
    """An engine that consists of one or more servers; `ServerSettings` has the fields. Each kind of server defines
    `dialect`."""

    def check(self, needs: EngineRequirements) -> list[str]:
        """See `EngineSpec.check`. Queries servers that are already running; those that proxima starts can only be
        queried once they run, by `HttpEngine.check`."""
        if needs.publishes and self.weight_folder is not None:
            remedy = "give a folder that the trainer can write and the servers can read; null: one in memory"
            check_writable("weight_folder", self.weight_folder, remedy)
        if self.serve is None:
            return check_servers_of(self, needs)
        dialect = self.dialect()
        if needs.publishes:
            self.way_of_weights(on_gpus=needs.sleeps, shared=needs.sleeps, adapter_rank=needs.adapter_rank)
        with within("serve"):
            length = self.serve.max_length
            context = needs.model.context
            reason = f"is less than the {context} tokens that prompt and completion may have"
            remedy = "null takes those; or lower model.max_length"
            require(length is None or length >= context, "max_length", length, reason, remedy=remedy)
            check_serve(dialect.kind, self.serve, model=needs.model.path)
        return []

    def way_of_weights(
        self, *, on_gpus: bool, shared: bool, adapter_rank: int, elsewhere: bool = False
    ) -> tuple[str, str]:
        """How new weights get to servers that proxima starts, and why: a kind's ways are known before one runs.

        Args:
            on_gpus: they compute on GPUs, as far as known.
            shared: on those of the trainer's ranks.
            adapter_rank: of the run's adapters; 0: none.
            elsewhere: some may be on other machines than rank 0.

        Raises:
            FieldError: the way that the recipe names does not reach them, or there is none.
        """
        dialect = self.dialect()
        device = "cuda" if on_gpus else None
        facts = ServerFacts(
            server=dialect.kind, model="", transfers=dialect.offers, device=device, adapter_rank=adapter_rank
        )
        return choose_transport(Receivers([facts], self, shared, adapter_rank, elsewhere))

    def longest_sequence(self) -> int | None:
        """See `EngineSpec.longest_sequence`."""
        if self.serve is None:
            return longest_sequence(self)
        return self.serve.max_length

    def build(self, setup: EngineSetup) -> HttpEngine:
        """Build the engine, once the servers answer.

        Raises:
            FieldError, UserError: they do not answer, or differ from one another or from the model; see
                `start_servers`.
        """
        rules = CompletionRules.of(setup)
        sync = WeightSync(self, setup)
        if self.serve is None:
            return HttpEngine(self, rules, sync)
        with within("serve"):
            servers = start_servers(
                self.dialect().kind,
                self.serve,
                model=setup.model_path,
                max_length=setup.max_length,
                log=setup.log,
                **self.launch_options(setup.adapter_rank),
            )
        return HttpEngine(self, rules, sync, servers)
