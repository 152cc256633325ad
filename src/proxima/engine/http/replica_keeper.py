"""Keeps replicas healthy and on the newest weights."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any

from proxima.data import UserError
from proxima.engine.http.client import RefusedError, ServerError
from proxima.engine.http.folder_sync import FolderSync, Report, sync_figures
from proxima.engine.http.replica import Replica, no_replica_left, too_busy
from proxima.engine.http.replica_pool import ReplicaPool
from proxima.engine.http.replica_states import Event, State
from proxima.engine.http.server_checks import ServerExpectations
from proxima.engine.http.version_proof import mark_confirmed
from proxima.engine.protocol import WeightUpdate
from proxima.engine.serve import Servers

QUEUE_SECONDS = 1.0  # between two health checks of a server while completions wait for room
LONGEST_WAIT = 60.0  # before the next health check of a server that fails repeatedly


class ReplicaKeeper:
    """Health checks, ejection and return of replicas, and new weights. Runs in the engine's own loop.

    A replica is ejected when it neither answers nor produces tokens, when it has the wrong weights or the wrong model,
    and when it was restarted. It returns when it answers all the initial questions as before, and was found to compute
    with the newest weights.

    Args:
        tag: prefix of the version labels, unique to the engine.
        servers: servers started for the engine; None: they were already running.
    """

    def __init__(
        self, pool: ReplicaPool, sync: FolderSync, expected: ServerExpectations, *, tag: str, servers: Servers | None
    ) -> None:
        self.pool, self.sync, self.expected, self.tag, self.servers = pool, sync, expected, tag, servers
        self.version = 0
        self.reports: list[Report] = []  # of the last `publish`
        self._prepare_seconds = 0.0  # of the last `publish`, before the first server received anything
        self._newest: str | None = None  # label of the weights that were prepared last
        self._any_proven = False  # a replica was found to compute with our weights
        self._numbers = count(1)
        self._publishing, self._syncing = asyncio.Lock(), asyncio.Lock()  # the latter also during a return
        self._epoch = 0  # changes when weights do
        self._returning: dict[Replica, asyncio.Task[None]] = {}
        self._loading = set[Replica]()  # returning replicas that are loading weights
        self._interrupted = set[Replica]()  # returning replicas that newer weights have interrupted
        self._soon = {replica: asyncio.Event() for replica in pool.replicas}
        self._away_since: float | None = None
        self._closed = False
        pool.check_soon = lambda replica: self._soon[replica].set()
        self._tasks = [asyncio.create_task(self._watch(replica)) for replica in pool.replicas]

    @property
    def published(self) -> bool:
        """True if the weights are ours."""
        return self._newest is not None

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of the last `publish`; empty before the first."""
        return sync_figures(self.reports) | {"prepare_seconds": self._prepare_seconds} if self.reports else {}

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def publish(self, update: WeightUpdate) -> None:
        """See `Engine.publish`. A replica that does not compute with the weights is ejected. It is an error at the
        first sync, where the cause is how it was started, and if no other replica has the weights or may return to get
        them.

        Raises:
            UserError: the weights did not arrive, or no replica is left.
        """
        async with self._publishing:
            await self._publish(update)

    async def _publish(self, update: WeightUpdate) -> None:
        pool = self.pool
        for replica in self._loading - self._interrupted:
            self._returning[replica].cancel()  # it would return with outdated weights; next time it is not cancelled
            self._interrupted.add(replica)
        async with self._syncing:
            label = f"{self.tag}.{next(self._numbers)}.v{update.version}"
            started_at = monotonic()
            await self.sync.prepare(update, label)
            self._prepare_seconds = monotonic() - started_at
            self._epoch += 1
            pool.loading = True
            try:
                if pool.spec.interrupt == "finish":
                    await pool.drain()
                await pool.stop_sampling()
                await pool.each(pool.serving, self._confirm)
                self._newest, self.version, self.reports = label, update.version, []
                await self._push_to_all(pool.serving)
            except BaseException:
                pool.loading = False
                raise
            finally:
                self._epoch += 1
        try:
            while not pool.serving:
                await pool.change()
            if pool.paused:
                await pool.each([replica for replica in pool.serving if replica.running], Replica.hold)
            else:
                await pool.each(pool.serving, Replica.resume)
        finally:
            pool.loading = False
            pool.dispatch()

    async def _confirm(self, replica: Replica) -> None:
        """Check that the completions that it holds, and will continue under new weights, were sampled by the weights it
        was given.

        Raises:
            ServerError: this could not be confirmed.
        """
        problem = await replica.proof.confirm(replica.proof.label, self.pool.spec.call_seconds)
        if problem is not None:
            raise ServerError(replica.url, "", problem)

    async def _push_to_all(self, replicas: Sequence[Replica]) -> None:
        first = not self._any_proven

        async def push(replica: Replica) -> None:
            try:
                self.reports.append(await self._push(replica))
            except (ServerError, RefusedError) as error:
                event = Event.REFUSED if isinstance(error, RefusedError) else Event.EJECTED
                self.pool.move(replica, event, f"new weights: {error.reason}")
                self._soon[replica].set()
            except UserError as error:
                self.pool.move(replica, Event.EJECTED, f"new weights: {error}")
                raise

        errors = await asyncio.gather(*map(push, replicas), return_exceptions=True)
        away = [replica for replica in self.pool.replicas if replica not in replicas and replica.state is State.AWAY]
        for error in errors:
            others_have_them = isinstance(error, UserError) and not first and len(self.reports) + len(away) > 0
            if isinstance(error, BaseException) and not others_have_them:
                raise error

    async def _push(self, replica: Replica) -> Report:
        assert self._newest is not None
        await replica.proof.question.answered()
        with replica.proof.proving(self.version, self._newest):
            report = await self.sync.push(replica)
        self._any_proven = True
        return report

    # ---- health ------------------------------------------------------------------------------------------------------

    async def _watch(self, replica: Replica) -> None:
        try:
            await self._keep(replica)
        except Exception as error:  # a bug; no caller may wait forever
            self.pool.give_up(error)
            raise

    async def _keep(self, replica: Replica) -> None:
        soon = self._soon[replica]
        while not self._closed:  # a call that fails while it is cancelled may hide the cancellation
            with suppress(TimeoutError):
                async with asyncio.timeout(self.pause_of(replica)):
                    await soon.wait()
            soon.clear()
            if replica.in_service:
                await self._check(replica)
            elif replica.state is not State.BARRED and not self.pool.asleep:  # the trainer has its devices
                await self._try_return(replica)
            self._fail_if_none_left()

    def pause_of(self, replica: Replica) -> float:
        """Seconds until the next health check; they grow with repeated failures."""
        seconds = self.pool.spec.health_seconds
        if replica.in_service:
            return min(seconds, QUEUE_SECONDS) if len(self.pool.router) else seconds
        return min(seconds * 2.0 ** min(max(0, replica.setbacks - 1), 10), LONGEST_WAIT)

    async def _check(self, replica: Replica) -> None:
        pool, proof, epoch, received = self.pool, replica.proof, self._epoch, replica.received
        segments = proof.unverified()
        try:
            async with asyncio.timeout(pool.spec.call_seconds):
                health = await replica.health()
        except (ServerError, TimeoutError, UserError) as error:
            if isinstance(error, ServerError) and error.busy:
                replica.overloaded(asyncio.get_running_loop().time(), error.reason)
            elif replica.received == received:  # otherwise it produces tokens and is only slow
                event = Event.REFUSED if isinstance(error, RefusedError) else Event.EJECTED
                reason = "no answer to a health check" if isinstance(error, TimeoutError) else error.reason
                pool.move(replica, event, reason)
            return
        settled = epoch == self._epoch and not pool.loading
        if problem := proof.problem(health, proof.label if settled else None):
            pool.move(replica, Event.EJECTED, problem)
        elif replica.in_service:  # still
            if settled:
                mark_confirmed(segments)
            replica.adapt(health, len(pool.router) > 0)
            pool.move(replica, Event.CHECKED)

    async def _try_return(self, replica: Replica) -> None:
        task = self._returning[replica] = asyncio.create_task(self._return(replica))
        try:
            await asyncio.wait({task})
        finally:
            del self._returning[replica]
            self._loading.discard(replica)
            task.cancel()
        if task.cancelled():  # newer weights are on their way
            self._soon[replica].set()
        elif (error := task.exception()) is not None:
            if not isinstance(error, ServerError | UserError | TimeoutError):
                raise error
            reason = "no answer" if isinstance(error, TimeoutError) else error.reason
            self.pool.move(replica, Event.STILL_REFUSED if isinstance(error, RefusedError) else Event.STILL_AWAY)
            if isinstance(error, UserError) and replica.setbacks <= 2 and reason not in replica.reason:  # told once
                self.pool.add_event(f"engine: {replica.url} stays out of service: {reason}")
            replica.reason = reason

    async def _return(self, replica: Replica) -> None:
        """Put it back into service.

        Raises:
            ServerError, UserError, TimeoutError: it is not healthy yet.
        """
        dialect, client, proof, seconds = replica.dialect, replica.client, replica.proof, self.pool.spec.call_seconds
        async with asyncio.timeout(seconds):
            await replica.health()
        async with asyncio.timeout(seconds):
            await replica.resume()  # a paused server answers no completion
            facts = await dialect.probe(client)
            problem = await self.expected.problem(dialect, client, facts)
        if problem is not None:
            raise ServerError(replica.url, "", problem)
        replica.facts = facts
        async with self._syncing:
            self._loading.add(replica)
            if self.published:
                await replica.stop("interrupted")
                try:
                    await self._push(replica)
                except (ServerError, UserError):
                    replica.setbacks += 1
                    raise
            if problem := proof.problem(await replica.health(), proof.label):
                raise ServerError(replica.url, "", problem)
            if self.pool.asleep:  # put to sleep while it returned; it tries again when the trainer is done
                await replica.sleep()
                raise ServerError(replica.url, "", "the trainer has its devices")
            if self.pool.paused:
                await replica.stop("interrupted")
            else:
                await replica.resume()
            self.pool.move(replica, Event.RETURNED)
            self._interrupted.discard(replica)

    def _fail_if_none_left(self) -> None:
        pool, now = self.pool, asyncio.get_running_loop().time()
        if pool.asleep:  # nobody waits for them
            self._away_since = None
            return
        if pool.serving:
            self._away_since = None
            self._fail_if_all_busy(now)
            return
        self._away_since = now if self._away_since is None else self._away_since
        failure = None if self.servers is None else self.servers.failure
        if failure is None and all(replica.state in (State.BARRED, State.LOCKED) for replica in pool.replicas):
            keys = all(replica.refuses_key for replica in pool.replicas)
            remedy = "check token_env, and what the servers were started with"
            failure = no_replica_left(pool.replicas, remedy if keys else "look at the server's log, start it again")
        if failure is None and now - self._away_since >= pool.spec.away_seconds:
            failure = no_replica_left(pool.replicas)
        if failure is not None:
            pool.give_up(failure)

    def _fail_if_all_busy(self, now: float) -> None:
        pool = self.pool
        if not pool.jobs:  # nothing waits for them
            for replica in pool.serving:
                replica.busy_since = None
        elif all(now - (replica.busy_since or now) >= pool.spec.away_seconds for replica in pool.serving):
            pool.give_up(too_busy(pool.serving, pool.spec.away_seconds))

    async def close(self) -> None:
        """Stop watching."""
        self._closed = True
        for task in [*self._tasks, *self._returning.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._returning.values(), return_exceptions=True)
