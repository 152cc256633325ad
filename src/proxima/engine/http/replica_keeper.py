"""Keeps replicas healthy and on the newest weights."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from time import monotonic
from typing import Any

from proxima.data import UserError
from proxima.engine.http.answer_checks import WrongAnswerError
from proxima.engine.http.client import Address, RefusedError
from proxima.engine.http.dialect import ServerFacts, is_incomplete
from proxima.engine.http.replica import Replica, no_replica_left
from proxima.engine.http.replica_pool import ReplicaPool
from proxima.engine.http.replica_state import State
from proxima.engine.http.run_labels import came_before, run_of
from proxima.engine.http.server_checks import server_difference
from proxima.engine.http.server_file import ServerFile
from proxima.engine.http.version_proof import mark_confirmed
from proxima.engine.http.weights.stream import OutdatedError
from proxima.engine.http.weights.sync import Report, StagedWeights, WeightSync, sync_figures
from proxima.engine.http.weights.transport import PushRound
from proxima.engine.protocol import ServerError, StoppedWaitingError, WeightUpdate
from proxima.engine.serve.servers import Servers

WATCHES = 20  # within `away_seconds`, of whether any replica works
OTHERS = "wait until the other run has ended, or give each run servers of its own"


class ReplicaKeeper:
    """Health checks, ejection and return of replicas, and new weights. Runs in the engine's own loop.

    A replica is ejected if it neither answers nor produces tokens, has the wrong weights or the wrong model, or was
    restarted. It returns once it answers all initial queries as before and a probe shows that it computes with the
    newest weights. A replica that joins during the run begins out of service and follows the same path.

    Args:
        facts: those of the servers; a returning server is compared with them.
        tokenizer: the trainer's.
        run: prefix of the version labels; see `run_labels`.
        servers: servers started for the engine; None: they were already running.
    """

    def __init__(
        self, pool: ReplicaPool, sync: WeightSync, facts: ServerFacts, tokenizer: Any, run: str, servers: Servers | None
    ) -> None:
        self.pool = pool
        self.sync = sync
        self.servers = servers
        self.facts = facts
        self.tokenizer = tokenizer
        self.run = run
        self.version = 0
        self.reports: list[Report] = []  # of the last `publish`
        self._prepare_seconds = 0.0  # of the last `publish`, to copy the weights
        self._newest: str | None = None  # label of the weights that servers are sent
        self._staged: tuple[WeightUpdate, StagedWeights] | None = None  # those of the next `publish`
        self._numbers = count(1)
        self._publishing = asyncio.Lock()
        self._syncing = asyncio.Lock()  # also during a return
        self._loading: dict[Replica, asyncio.Timeout] = {}  # ends the loading of weights of a returning replica
        self._goes_first = False  # newer weights wait for `_syncing`
        self._awaiting = set[Replica]()  # those that return with the next weights: the trainer no longer has the newest
        self._returning = set[Replica]()  # those that something tries to put back into service at this moment
        self._left_to_others = False  # a server, because a run that came before this one trains with it
        self._met = set[tuple[Replica, str]]()  # runs that came later and have sent weights to a server
        self._interrupted = set[Replica]()  # those that newer weights have interrupted, until they have returned
        self._idle_since: float | None = None  # no replica has worked or produced anything since then
        self._produced = 0  # tokens, completions and scores
        self._closed = False
        self._stopping = False
        self._late = set[Replica]()  # those that came during the run
        self._keeping = dict[Replica, asyncio.Task[None]]()
        self._tasks = set[asyncio.Task[None]]()
        for replica in pool.replicas:
            replica.proof.run = run
            self._keeping[replica] = self._start(self._keep(replica))
        self._start(self._watch())
        if servers is None and pool.spec.url_file is not None:
            spec = pool.spec
            self._start(self._follow(ServerFile(str(spec.url), spec.token_env, spec.allow_remote)))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of the last `publish`; empty before the first."""
        if self.reports:
            return sync_figures(self.reports) | {"prepare_seconds": self._prepare_seconds}
        return {}

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def stage(self, update: WeightUpdate) -> None:
        """See `StagingEngine.stage`. A server that returns before `publish` is sent the former weights, also meanwhile.

        Raises:
            UserError: the weights can't be copied, or there is no way to send them.
        """
        async with self._publishing:
            self._staged = update, await self._prepare(update)

    async def _prepare(self, update: WeightUpdate) -> StagedWeights:
        started_at = monotonic()
        label = self.sync.label_of(self.run, next(self._numbers), update.version)
        if self._newest is None:  # a server that came late must not end the run
            initial = [replica for replica in self.pool.serving if replica not in self._late]
            line = await self.sync.check(initial, update)
            if line is not None:
                self.pool.events.append(line)
        staged = await self.sync.prepare(update, label, self.facts.dtype)
        self._prepare_seconds = monotonic() - started_at
        return staged

    @asynccontextmanager
    async def _before_returns(self) -> AsyncIterator[None]:
        """Hold `_syncing` before any server that returns: it would load weights that are outdated at once. A server
        that is loading them at this moment is interrupted, and tries again later. The next time it is let finish, or
        it would never return to a run whose weights come faster than it loads them."""
        for replica in self._loading.keys() - self._interrupted:
            self._interrupt(replica)
            self._interrupted.add(replica)
        self._goes_first = True
        try:
            await self._syncing.acquire()
        finally:
            self._goes_first = False
        try:
            yield
        finally:
            self._syncing.release()

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
        async with self._before_returns():
            staged = self._take_staged(update) or await self._prepare(update)
            pool.loading = True
            try:
                if pool.spec.interrupt == "finish":
                    await pool.drain()
                await pool.stop_sampling()
                # what it holds, and will continue under new weights, must be from the weights that it was given
                await pool.each(pool.serving, lambda replica: replica.proof.confirm(replica.proof.label))
                first = self._newest is None
                self._newest = staged.handover.label
                self.sync.newest = staged
                self.version = update.version
                self.reports = []
                await self._push_to_all(pool.serving, first=first)
                late = [replica for replica in self._awaiting if replica not in self._returning]
                await asyncio.gather(*(self._try_return(replica, holds_lock=True) for replica in late))
            except BaseException:
                pool.loading = False
                raise
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

    def _take_staged(self, update: WeightUpdate) -> StagedWeights | None:
        """What `stage` has prepared, if it was for this update."""
        ahead = self._staged
        self._staged = None
        if ahead is None:
            return None
        of_update, staged = ahead
        return staged if of_update is update else None

    async def _push_to_all(self, replicas: Sequence[Replica], *, first: bool) -> None:
        push_round = PushRound(replicas)

        async def push(replica: Replica) -> None:
            try:
                self.reports.append(await self._push(replica, push_round))
            except (ServerError, UserError) as error:
                self.pool.eject(replica, error, "new weights: ")
                if not isinstance(error, ServerError | RefusedError):
                    raise
                replica.status.check_soon.set()
            finally:
                push_round.copies.leave(replica)
                push_round.leave(replica)

        outcomes = await asyncio.gather(*map(push, replicas), return_exceptions=True)
        errors = dict(zip(replicas, outcomes, strict=True))
        away = [r for r in self.pool.replicas if errors.get(r) is None and r.status.state is State.AWAY]
        others_have_them = len(self.reports) + len(away) > 0
        for replica, error in errors.items():
            if error is None:
                continue
            decides = first and replica not in self._late
            if isinstance(error, UserError) and others_have_them and not decides:
                continue
            raise error

    async def _push(self, replica: Replica, push_round: PushRound | None = None) -> Report:
        assert self._newest is not None
        await replica.proof.answered()
        with replica.proof.proving(self.version, self._newest):
            try:
                report = await self.sync.push(replica, push_round)
            except UserError as error:
                await self._check_alone(replica, error)
                raise
        replica.proof.saw(self._newest)
        return report

    async def _check_alone(self, replica: Replica, error: UserError) -> None:
        """Raise ServerError if another run has sent its weights between ours: the server is not to blame."""
        with suppress(ServerError, UserError):
            await replica.health()
        if replica.proof.rival is not None:
            reason = f"another run has sent it weights meanwhile, {replica.proof.rival!r}"
            raise ServerError(replica.url, "", reason) from error

    async def sleep(self) -> None:
        """See `ReplicaPool.sleep`. A server that is loading weights to return is put to sleep, too."""
        self.pool.asleep = True
        for replica in self._loading:
            self._interrupt(replica)
        await self.pool.sleep()

    def _interrupt(self, replica: Replica) -> None:
        """End the loading of weights of a replica that returns."""
        loading = self._loading[replica]
        if not loading.expired():  # one that newer weights have ended may still be on its way out
            loading.reschedule(0.0)

    # ---- servers that join and leave ---------------------------------------------------------------------------------

    async def _follow(self, file: ServerFile) -> None:
        """Read the file with the addresses repeatedly. If it has an error, the servers stay as they are."""
        try:
            while not self._closed:
                news = await file.news()
                if isinstance(news, str):
                    self.pool.events.append(f"{news}; until then the run goes on with the servers that it has")
                elif news is not None:
                    self._change(news, file.url)
                await asyncio.sleep(self.pool.spec.health_seconds)
        except Exception as error:  # a bug, as in `_keep`
            self.pool.give_up(error)
            raise

    def _change(self, addresses: Sequence[Address], place: str) -> None:
        """Add the new servers, and remove those that are no longer listed."""
        pool = self.pool
        known = {replica.url: replica for replica in pool.replicas}
        listed = {address.url for address in addresses}
        for address in addresses:
            if address.url not in known:
                like = pool.known[0]
                label = like.proof.label if self._newest is None else None
                replica = Replica(address, like.dialect, pool.spec, like.tag)
                replica.facts = self.facts
                replica.proof.run = self.run
                replica.proof.set_version(0, label)
                replica.status.check_soon.set()
                self._late.add(replica)
                pool.add(replica)
                self._keeping[replica] = self._start(self._keep(replica))
        for url, replica in known.items():
            if url not in listed:
                self._keeping.pop(replica).cancel()
                self._interrupted.discard(replica)
                self._awaiting.discard(replica)
                self.sync.forget(replica)
                pool.remove(replica, f"{place} does not list it any more")
                if replica.pause in ("held", "stopped"):
                    self._start(self._let_go(replica))

    async def _let_go(self, replica: Replica) -> None:
        """Resume a server that has left in a pause: others may use it. One that does not answer, or has incomplete
        weights, is left as it is, and so is one that joins again."""
        with suppress(ServerError, UserError):
            await replica.health()
            async with self._syncing:  # it may be loading weights at this moment
                again = any(other.url == replica.url and other is not replica for other in self.pool.replicas)
                if not again and not is_incomplete((await replica.health()).weight_version):
                    await replica.resume()

    def _leaves_to_other(self, replica: Replica) -> bool:
        """Decide about a server that another run has given its weights. Two runs can't train with it: the one that came
        later leaves it to the other, which gives it its own weights again. True: this run has left it."""
        rival = replica.proof.rival
        replica.proof.rival = None
        run = run_of(rival)
        if run is None:
            return False
        if came_before(run, self.run):
            self._left_to_others = True
            self.pool.bar(replica, f"another run trains with it, which came before this one: it has weights {rival!r}")
            if replica.pause in ("held", "stopped"):
                self._start(self._let_go(replica))
            self._fail_if_none_works()
            return True
        if (replica, run) not in self._met:
            self._met.add((replica, run))
            said = f"engine: {replica.url}: another run, which came after this one, has sent it weights, {rival!r}"
            self.pool.events.append(f"{said}; it is given those of this run again; {OTHERS}")
        return False

    # ---- health ------------------------------------------------------------------------------------------------------

    async def _keep(self, replica: Replica) -> None:
        status = replica.status
        try:
            # a call that fails while it is cancelled may hide the cancellation
            while not self._closed and replica in self._keeping:
                seconds = status.check_seconds(self.pool.spec.health_seconds)
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await status.check_soon.wait()
                status.check_soon.clear()
                if replica.in_service:
                    await self._check(replica)
                elif status.may_return and not self.pool.asleep and replica not in self._returning:
                    await self._try_return(replica)
        except Exception as error:  # a bug; no caller may wait forever
            self.pool.give_up(error)
            raise

    async def _check(self, replica: Replica) -> None:
        pool = self.pool
        proof = replica.proof
        received = replica.received
        label = proof.label
        loading = pool.loading
        parts = proof.unverified()
        try:
            health = await replica.health()
        except (ServerError, UserError) as error:
            busy = isinstance(error, ServerError) and error.busy
            if not busy and replica.received == received:  # otherwise it produces tokens and is only slow
                pool.eject(replica, error)
            return
        if self._leaves_to_other(replica):
            return
        settled = label == proof.label and not (loading or pool.loading)  # no new weights have come meanwhile
        problem = proof.problem(health, label if settled else None)
        if health.model not in (None, replica.facts.model):
            problem = f"it serves {health.model} now, not {replica.facts.model}"
        if problem is not None:
            pool.eject(replica, ServerError(replica.url, "", problem))
        elif replica.in_service:  # still
            if settled:
                mark_confirmed(parts)
            replica.adapt(health.waiting, queued=len(pool.router) > 0)
            pool.trust(replica)

    async def _try_return(self, replica: Replica, *, holds_lock: bool = False) -> None:
        """Put it back into service, if it is healthy. One attempt at a time: it resumes the server, and another one may
        be loading weights into it.

        Args:
            holds_lock: `_syncing` is held.
        """
        self._returning.add(replica)
        try:
            await self._attempt_return(replica, holds_lock=holds_lock)
        finally:
            self._returning.discard(replica)

    async def _attempt_return(self, replica: Replica, *, holds_lock: bool) -> None:
        try:
            await self._check_return(replica)
            if self._leaves_to_other(replica):
                return
            if holds_lock:
                await self._take_in(replica)
                return
            async with self._syncing:
                if self._goes_first:
                    replica.status.check_soon.set()
                    return
                await self._take_in(replica)
        except (ServerError, UserError) as error:
            if replica in self._keeping:
                await self._stay_out(replica, error)

    async def _stay_out(self, replica: Replica, error: ServerError | UserError) -> None:
        """It has failed to return."""
        reason = error.reason
        status = replica.status
        if isinstance(error, OutdatedError):
            self._awaiting.add(replica)
        if self.pool.asleep and replica.pause != "asleep":  # the trainer is using its devices
            with suppress(ServerError, UserError):
                await replica.sleep()
        if replica in self.pool.joining:
            if reason != status.reason:
                self.pool.events.append(f"engine: {replica.url} can't join yet: {reason}")
        elif isinstance(error, UserError) and status.ejections <= 2 and reason not in status.reason:  # said once
            self.pool.events.append(f"engine: {replica.url} stays out of service: {reason}")
        status.failed_to_return(reason, refused=isinstance(error, RefusedError))

    async def _check_return(self, replica: Replica) -> None:
        """Check that it is healthy, and as the others.

        Raises:
            ServerError, UserError: it is not.
        """
        await replica.health()
        await replica.resume()  # a paused server answers no completion
        facts = await replica.dialect.probe(replica.client)
        problem = await server_difference(replica, facts, self.facts, self.tokenizer)
        if problem is None and self.pool.repeatable and not facts.batch_invariant:
            problem = "its completions depend on the batch, and those of the others do not"
        if problem is not None:
            raise ServerError(replica.url, "", problem)
        replica.facts = facts

    async def _take_in(self, replica: Replica) -> None:
        """Give it the newest weights, and put it into service. `_syncing` is held.

        Raises:
            ServerError, UserError: it has not got them.
        """
        proof = replica.proof
        if replica.in_service or replica not in self._keeping:  # it has returned meanwhile, or left
            return
        await self._sleep_if_all_do(replica)
        if self._newest is not None and not await self._load_newest(replica):
            return
        health = await replica.health()
        problem = proof.problem(health, proof.label)
        if problem:
            raise ServerError(replica.url, "", problem)
        await self._pause_as_the_others(replica)
        await self._sleep_if_all_do(replica)
        if replica not in self._keeping:  # it has left meanwhile
            return
        self.pool.welcome(replica)
        self._interrupted.discard(replica)
        self._awaiting.discard(replica)

    async def _load_newest(self, replica: Replica) -> bool:
        """Push the newest weights to a server that returns. False: it was interrupted, and tries again.

        Raises:
            ServerError, UserError: it has not got them.
        """
        await replica.stop("interrupted")
        with suppress(WrongAnswerError):  # what it has sampled can't be confirmed later
            await replica.proof.confirm(replica.proof.label)
        try:
            async with asyncio.timeout(None) as self._loading[replica]:
                await self._push(replica)
        except TimeoutError:  # newer weights are on their way, or the trainer uses its devices
            await self._sleep_if_all_do(replica)
            replica.status.check_soon.set()
            return False
        except OutdatedError:
            raise
        except (ServerError, UserError):
            replica.status.failed_to_load()
            raise
        finally:
            del self._loading[replica]
        return True

    async def _pause_as_the_others(self, replica: Replica) -> None:
        """Stop the server if the engine is paused, or resume it. A pause may begin or end before the server has been
        told. While the pool drains it is resumed: there are completions for it to continue."""
        told = None
        while told != (stops := self.pool.paused and not self.pool.draining):
            told = stops
            if stops:
                await replica.stop("interrupted")
            else:
                await replica.resume()

    async def _sleep_if_all_do(self, replica: Replica) -> None:
        """Put it to sleep if the others are, perhaps since it began to return; it tries again when the trainer is done.

        Raises:
            ServerError: they are.
        """
        if self.pool.asleep:
            await replica.sleep()
            raise ServerError(replica.url, "", "the trainer is using its devices")

    def stop_waiting(self) -> None:
        """See `HttpEngine.stop_waiting`."""
        self._stopping = True
        self._fail_if_none_works()

    async def _watch(self) -> None:
        """Call `_fail_if_none_works` repeatedly, whatever call to a server is waited for."""
        spec = self.pool.spec
        seconds = min(spec.health_seconds, spec.away_seconds / WATCHES)
        try:
            while not self._closed:
                await asyncio.sleep(seconds)
                self._fail_if_none_works()
        except Exception as error:  # a bug, as in `_keep`
            self.pool.give_up(error)
            raise

    def _fail_if_none_works(self) -> None:
        """Fail all waiting completions if no replica will return, or if none has produced anything for `away_seconds`
        and every one has a fault."""
        pool = self.pool
        now = asyncio.get_running_loop().time()
        awaited = not pool.serving or (pool.sends and (pool.jobs or pool.scores))
        if self._any_works() or pool.asleep or not awaited:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        if self._stopping and not pool.serving and not pool.asleep:
            told = no_replica_left(pool.replicas, "start it again")
            pool.give_up(StoppedWaitingError(told.reason, remedy=told.remedy))
        elif not pool.serving and self.servers is not None and self.servers.failure is not None:
            pool.give_up(self.servers.failure)
        elif all(replica.status.state in (State.LOCKED, State.BARRED) for replica in pool.replicas):
            remedy = "check token_env and the server's log, start it again"
            if self._left_to_others:
                remedy = OTHERS
            pool.give_up(no_replica_left(pool.replicas, remedy))
        elif self._idle_since is not None and now - self._idle_since >= pool.spec.away_seconds:
            remedy = "start it again"
            if pool.serving:
                remedy = "lower engine.max_running or raise engine.away_seconds"
            pool.give_up(no_replica_left(pool.replicas, remedy))

    def _any_works(self) -> bool:
        """True if a replica has produced something since the last call, or may without having a fault."""
        before = self._produced
        self._produced = sum(replica.received + replica.successes for replica in self.pool.known)
        if self._produced != before or self._awaiting:  # these wait for the trainer
            return True
        loads = any(replica.status.ejections <= 1 for replica in self._loading)  # the first attempt, which may be long
        return loads or any(replica.status.works for replica in self.pool.replicas)

    async def close(self) -> None:
        """Stop watching."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
