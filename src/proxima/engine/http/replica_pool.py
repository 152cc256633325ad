"""Many replicas as one: completions go to replicas with room, and to another replica when one fails."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeGuard
from zlib import crc32

import numpy as np

from proxima.data.columns import Floats, Ints
from proxima.data.flow import prompt_name
from proxima.engine.http.answer_checks import WrongAnswerError
from proxima.engine.http.client import RefusedError, busy_seconds
from proxima.engine.http.dialect import WrittenTokens
from proxima.engine.http.generation_job import GenerationJob
from proxima.engine.http.replica import CancelReason, Failure, Replica, gave_up
from proxima.engine.http.replica_state import STREAK
from proxima.engine.http.router import Router
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.protocol import GrammarRefusedError, PauseMode, ScoreRequest, ServerError

CONFIRM_SECONDS = 5.0  # for a server whose completion broke off to confirm its weights, so that the tokens can be kept
BUSY_NEWS = 3  # consecutive waits for a busy server after which the user is notified


class ReplicaPool:
    """Runs completions on replicas, in the engine's own loop; no method blocks.

    A failed completion is retried, at another replica if there is one. Its tokens are kept, so that long completions,
    which fail more often, are not replaced by short ones; if the servers are deterministic, it starts over instead.
    More than `retries` consecutive attempts without tokens end the run. A server that is too busy (status 429, 503)
    gets a break; this does not count as a failure of the completion.

    `changed` is set when a completion or a replica comes or goes. `known`: all replicas, those included that have left;
    `joining`: those that are not in service yet.
    """

    def __init__(self, replicas: Sequence[Replica], spec: ServerSettings) -> None:
        self.spec = spec
        self.router = Router(replicas)
        self.known = list(replicas)
        self.joining = set[Replica]()
        self.paused = False  # by `pause`
        self.loading = False  # new weights
        self.draining = 0  # calls of `drain` that have not returned
        self.asleep = False  # between `sleep` and `wake`
        self.counts = Counter[str]()
        self.events: list[str] = []  # warnings for the user
        self.notes: list[str] = []  # lines for the user about what is as it should be
        self.changed = asyncio.Event()
        self.repeatable = spec.seeded and all(replica.facts.batch_invariant for replica in replicas)
        self._tasks: dict[asyncio.Task[None], GenerationJob] = {}
        self.scores = 0  # calls of `score` that have not returned
        self.failure: Exception | None = None  # no completion will come any more

    @property
    def replicas(self) -> Sequence[Replica]:
        """The replicas, including those out of service."""
        return self.router.replicas

    @property
    def serving(self) -> list[Replica]:
        """The replicas in service."""
        return [replica for replica in self.replicas if replica.in_service]

    @property
    def jobs(self) -> list[GenerationJob]:
        """The unfinished completions."""
        every_job = dict.fromkeys([*self._tasks.values(), *self.router.jobs])
        return [job for job in every_job if job.wanted]

    # ---- completions -------------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[GenerationJob]) -> None:
        """Run completions as soon as there is room."""
        for job in jobs:
            self._queue(job)
        self.dispatch()

    def _queue(self, job: GenerationJob, *, first: bool = False) -> None:
        if self.failure is not None:
            job.fail(self.failure)
        else:
            self.router.add(job, first=first)

    def dispatch(self) -> None:
        """Give waiting completions to replicas with room, unless there is a pause."""
        self.changed.set()
        self.changed = asyncio.Event()
        if self.sends:
            self._assign()

    @property
    def sends(self) -> bool:
        """True if waiting completions are given to replicas: outside pauses all, during a `drain` those that have
        started."""
        return self.draining > 0 or not (self.paused or self.loading)

    def _assign(self) -> None:
        drains = self.draining > 0
        for replica in self.replicas:
            while replica.has_room:
                job = self.router.next_for(replica, only_started=drains)
                if job is None:
                    break
                replica.assigned += 1
                task = asyncio.create_task(self._attempt(job, replica))
                self._tasks[task] = job
                task.add_done_callback(partial(self._over, replica))

    def _over(self, replica: Replica, task: asyncio.Task[None]) -> None:
        """Handle the end of an attempt, even one cancelled before it started."""
        self._tasks.pop(task, None)
        replica.assigned -= 1
        self.dispatch()

    async def _attempt(self, job: GenerationJob, replica: Replica) -> None:
        started_at = asyncio.get_running_loop().time()
        try:
            cancel_reason = None if job.reason else await self._run(job, replica)
            same = (job.policy_version == replica.proof.version).all()  # only those weights can score it
            if job.reason and same and self._wants_score(job):
                job.scored = await self._score(replica, job.request.prompt.tokens, job.tokens, job.rules.tokenizer)
        except (ServerError, WrongAnswerError, RefusedError) as error:
            self._failed(job, replica, error, started_at)
        except asyncio.CancelledError:
            job.discard()
            raise
        except Exception as error:  # its caller must not wait forever
            job.fail(error)
        else:
            self._ended(job, replica, aborted=cancel_reason == "aborted")

    async def _run(self, job: GenerationJob, replica: Replica) -> CancelReason | None:
        """Call `Replica.run`, and drop all tokens that the wrong weights may have sampled: because the server was
        restarted and does not report versions with each completion, or because it reported weights that it was then
        found not to have.

        Raises:
            ServerError, WrongAnswerError: as for `Replica.run`, or the completion may be from other weights.
        """
        proof = replica.proof
        segment = job.begin(replica.proof.version)
        label = proof.label
        broken = None
        cancel_reason: CancelReason | None = None
        proof.attempts.append(segment)
        try:
            cancel_reason = await replica.run(job)
            await proof.settled.wait()
            if segment.is_mismatched:
                self.counts["tokens_lost"] += job.forget(segment)
        except ServerError as error:
            if self.repeatable:  # nothing of it is kept
                raise
            broken = error
        finally:
            proof.attempts.remove(segment)
        try:
            if segment.is_unverified and len(segment.marks) > 1:
                raise WrongAnswerError("it was given weights before those that it had could be confirmed")
            if segment.is_unverified:
                seconds = None if broken is None else CONFIRM_SECONDS
                await proof.confirm(label, seconds)
        except WrongAnswerError as error:
            replica.status.suspected(error.reason)
            if broken is None and cancel_reason is None:
                self.counts["tokens_lost"] += job.forget(segment)
                raise
            self.counts["tokens_lost"] += job.forget_unconfirmed(segment)
        if broken is not None:
            raise broken
        return cancel_reason

    async def _score(self, replica: Replica, prompt: Ints, tokens: Ints, tokenizer: Any) -> Floats | None:
        """Call `Replica.score` and confirm that the replica's weights are those it was given. None: new weights arrived
        meanwhile.

        Raises:
            ServerError, WrongAnswerError: as for `Replica.score`, or the scores may be from other weights.
        """
        proof = replica.proof
        label = proof.label
        given = proof.given
        written = WrittenTokens.of(np.concatenate([prompt, tokens]), tokenizer)
        scores = await replica.score(written, len(prompt))
        await proof.confirm(label)
        return scores if proof.given == given else None

    def _ended(self, job: GenerationJob, replica: Replica, *, aborted: bool) -> None:
        """Handle an attempt that ended normally: the completion is finished, or was interrupted by a pause or an
        abort."""
        if job.reason is None:
            job.keep()
        else:
            replica.succeeded()
            self.counts["completed"] += 1
        if job.reason is not None:
            job.finish(job.reason)
        elif aborted:
            job.finish("abort")
        elif job.wanted:
            self._queue(job, first=True)

    def _failed(self, job: GenerationJob, replica: Replica, error: Failure, started_at: float) -> None:
        """Handle a failed attempt. If the server is too busy or refuses our key, it does not count as a failure of the
        completion."""
        if refuses_grammar(error, job):
            job.discard()
            job.fail(GrammarRefusedError(error.reason))
            return
        kept = 0
        if isinstance(error, ServerError) and not self.repeatable:
            kept = job.keep()
        else:
            self.counts["tokens_lost"] += job.discard()
        if _is_failure(error):
            job.tried.add(replica)
            kind = "lost" if isinstance(error, WrongAnswerError) else "failed"
            self.counts[kind] += 1
            job.failures = 0 if kept else job.failures + 1
        self._note_failure(replica, error, started_at)
        if not job.wanted:
            return
        if job.reason is not None and not self._wants_score(job):
            job.finish(job.reason)
        elif job.failures > self.spec.retries:
            uid, sample, _ = job.request.key
            job.fail(gave_up(f"{prompt_name(uid)}, sample {sample}", job.failures, replica, error))
        else:
            self.counts["retried"] += 1
            self._queue(job, first=True)

    def _note_failure(self, replica: Replica, error: Failure, started_at: float) -> None:
        """Update the state of a replica after a failed call."""
        if isinstance(error, RefusedError):
            self.eject(replica, error)
        elif isinstance(error, ServerError) and error.busy:
            self._rest(replica, error)
        elif replica.status.call_failed(error.reason, started_at, asyncio.get_running_loop().time()):
            self.eject(replica, error, f"{STREAK} calls in a row failed, the last one with: ")

    def _wants_score(self, job: GenerationJob) -> bool:
        sampling = job.request.sampling
        lacks_one = job.rules.log_probs == "processed" and sampling.truncates and sampling.temperature == 1
        return self.spec.untruncated == "score" and lacks_one and job.scored is None and job.length > 0

    def withdraw(self, jobs: Sequence[GenerationJob]) -> None:
        """Drop completions whose caller has left."""
        for job in jobs:
            job.withdraw()
        gone = set(jobs)
        self.router.take(lambda job: job in gone)
        for task, running in list(self._tasks.items()):
            if running in gone:
                task.cancel()

    async def abort(self, which: Callable[[GenerationJob], bool] | None = None) -> None:
        """End completions with finish_reason `abort`; None: all, in a pause."""
        for job in self.router.take(which or (lambda _: True)):
            job.finish(job.reason or "abort")
        await self.each(self.serving, lambda replica: replica.stop("aborted", which))

    async def score(self, request: ScoreRequest, tokenizer: Any) -> Floats:
        """[T] float32, nats; see `Engine.score`.

        Raises:
            UserError: no replica was able to score it.
        """
        tried = set[object]()
        failures = 0
        clock = asyncio.get_running_loop().time
        self.scores += 1
        try:
            while True:
                replica = await self._room(tried)
                started_at = clock()
                try:
                    scores = await self._score(replica, request.prompt_tokens, request.tokens, tokenizer)
                    if scores is not None:
                        return scores
                    error: Failure = ServerError(replica.url, "", "new weights arrived during scoring")
                    failures += 1
                except (ServerError, WrongAnswerError, RefusedError) as failure:
                    error = failure
                    self._note_failure(replica, error, started_at)
                    if _is_failure(error):
                        failures += 1
                        tried.add(replica)
                finally:
                    self.dispatch()
                if failures > self.spec.retries:
                    raise gave_up("scoring", failures, replica, error)
        finally:
            self.scores -= 1

    async def _room(self, tried: set[object]) -> Replica:
        """Wait for a replica with room; return the least loaded, preferring those that have not been tried."""

        def rank(replica: Replica) -> tuple[bool, float]:
            return replica in tried, self.router.occupancy(replica)

        while True:
            ready = [replica for replica in self.replicas if replica.has_room_to_score]
            if ready and not self.loading:
                return min(ready, key=rank)
            await self.change()

    # ---- replicas come and go ----------------------------------------------------------------------------------------

    def trust(self, replica: Replica) -> None:
        """Give a replica work again after a passed health check, unless it has a break."""
        replica.status.passed_check()
        self.dispatch()

    def _rest(self, replica: Replica, error: ServerError) -> None:
        """Leave a busy server alone for a while."""
        seconds = partial(busy_seconds, retry_after=error.retry_after, key=crc32(replica.url.encode()))
        if not replica.status.asked_for_break(error.reason, seconds, self.dispatch):
            return
        replica.adapt(len(replica.running) // 2)
        if replica.status.breaks == BUSY_NEWS:
            self.events.append(f"engine: {replica.url} is busy, completions wait: {error.reason}")

    def eject(self, replica: Replica, error: Exception, what: str = "") -> None:
        """Take a replica out of service: end its running completions, and move the waiting ones. No effect if it has
        left.

        Args:
            what: the call that failed, for the user.
        """
        if not replica.in_service:
            return
        reason = error.reason if isinstance(error, ServerError | RefusedError) else str(error)
        replica.status.ejected(f"{what}{reason}", refused=isinstance(error, RefusedError))
        replica.interrupt()
        self.counts["ejected"] += 1
        self.events.append(f"engine: {replica.url} is out of service: {replica.status.reason}")
        self.router.leave(replica)
        self.dispatch()

    def bar(self, replica: Replica, reason: str) -> None:
        """Take a replica out of service for good, or keep it out."""
        if not replica.in_service:
            self.events.append(f"engine: {replica.url} stays out of service: {reason}")
        self.eject(replica, ServerError(replica.url, "", reason))
        replica.status.removed(reason)
        self.joining.discard(replica)
        self.dispatch()

    def welcome(self, replica: Replica) -> None:
        """Put a replica into service, or back into service; it has the newest weights."""
        replica.status.joined()
        if replica in self.joining:
            self.joining.discard(replica)
            self.counts["joined"] += 1
            done = "has joined"
        else:
            self.counts["returned"] += 1
            done = "is back"
        self.events.append(f"engine: {replica.url} {done}, with weights of version {replica.proof.version}")
        self.dispatch()

    def add(self, replica: Replica) -> None:
        """Add a replica, which is out of service until it is welcome."""
        self.known.append(replica)
        self.joining.add(replica)
        self.router.join(replica)

    def remove(self, replica: Replica, reason: str) -> None:
        """Remove a replica for good; its running completions are continued elsewhere with their tokens so far."""
        replica.status.removed(reason)
        self.router.remove(replica)
        replica.interrupt()
        self.joining.discard(replica)
        self.counts["left"] += 1
        self.events.append(f"engine: {replica.url} has left: {reason}")
        self.dispatch()

    def give_up(self, error: Exception) -> None:
        """Fail all waiting completions with this error: no replica will return."""
        self.failure = error
        for job in self.router.take(lambda _: True):
            job.fail(error)
        self.dispatch()

    # ---- pauses ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        self.paused = True
        if mode == "wait":
            await self.drain()
        if mode == "abort":
            await self.abort()
        else:
            await self.stop_sampling()

    async def drain(self) -> None:
        """During a pause, finish the completions that have started and start no others."""
        held = [replica for replica in self.serving if replica.pause != "none"]
        await self.each(held, Replica.resume)
        self.draining += 1
        try:
            self.dispatch()
            while self._has_started_work():
                await self.change()
        finally:
            self.draining -= 1

    def _has_started_work(self) -> bool:
        """True if a completion that has started runs, or waits for a replica to continue it. New weights must not wait
        for a returning replica, because it waits for them."""
        if any(replica.assigned for replica in self.serving):
            return True
        waits = any(job.length for job in self.router.jobs)
        return waits and (bool(self.serving) or not self.loading)

    async def change(self) -> None:
        """Wait until a completion or a replica comes or goes.

        Raises:
            UserError: no replica will return.
        """
        if self.failure is not None:
            raise self.failure
        await self.changed.wait()

    async def stop_sampling(self) -> None:
        """Stop all sampling: running completions are held in place, or ended with the tokens they have."""

        async def stop(replica: Replica) -> None:
            if replica.in_place:
                await replica.hold()
            else:
                await replica.stop("interrupted")

        running = [replica for replica in self.serving if replica.pause == "none"]
        await self.each(running, stop)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self.each(self.serving, Replica.resume)
        while late := [replica for replica in self.serving if replica.pause != "none"]:  # has returned meanwhile
            await self.each(late, Replica.resume)
        self.paused = False
        self.dispatch()

    async def sleep(self) -> None:
        """During a pause, make every server in service release its devices to the trainer; none returns to service
        before `wake`. A server that fails to sleep is ejected."""
        self.asleep = True
        await self.each(self.serving, Replica.sleep)

    async def wake(self) -> None:
        """Make every server take back its devices; the pause continues. A server that fails to wake is ejected, and
        woken when it returns."""
        asleep = [replica for replica in self.serving if replica.pause == "asleep"]
        await self.each(asleep, Replica.wake)
        self.asleep = False

    async def each(self, replicas: Sequence[Replica], work: Callable[[Replica], Coroutine[Any, Any, None]]) -> None:
        """Run `work` on all replicas concurrently; a replica on which it fails is ejected."""

        async def work_at(replica: Replica) -> None:
            try:
                await work(replica)
            except (RefusedError, ServerError, WrongAnswerError) as error:
                self.eject(replica, error)

        await asyncio.gather(*(work_at(replica) for replica in replicas))


def refuses_grammar(error: Failure, job: GenerationJob) -> TypeGuard[ServerError]:
    """True if a server has refused a request for its grammar, before it sampled a token."""
    asked = job.request.grammar is not None and not job.length
    return asked and isinstance(error, ServerError) and error.status == 400


def _is_failure(error: Exception) -> bool:
    """Return False if the server is busy or refuses our key: it would do so with every other call."""
    if isinstance(error, RefusedError):
        return False
    return not isinstance(error, ServerError) or not error.busy
