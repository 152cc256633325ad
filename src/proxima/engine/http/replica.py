"""One server and its running completions."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from proxima.data import UserError
from proxima.data.columns import Floats
from proxima.engine.http.answer_checks import WrongAnswerError, checked_log_probs
from proxima.engine.http.client import Address, RefusedError, ServerClient
from proxima.engine.http.dialect import Chunk, Dialect, ServerFacts, ServerHealth, WrittenTokens
from proxima.engine.http.generation_job import GenerationJob
from proxima.engine.http.replica_state import ReplicaState, State
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.http.version_proof import VersionProof
from proxima.engine.protocol import ServerError

ABORT_SECONDS = 5.0  # for a server that aborted a completion to send its last tokens
READ_OUT_SECONDS = 1.0  # for the end of an answer whose tokens have all arrived
FIRST_LIMIT, HIGHEST_LIMIT = 256, 4096  # concurrent completions, if the limit adapts

CancelReason = Literal["interrupted", "aborted"]
Failure = ServerError | WrongAnswerError | RefusedError  # the failure of a call that may succeed at another server


@dataclass(eq=False)
class RunningCall:
    """A completion that a server is generating.

    Args:
        timeout: ends it when no token arrives.
        cancel_reason: why it was cancelled before the completion ended; None: it was not cancelled.
        answered: a chunk has arrived.
    """

    job: GenerationJob
    timeout: asyncio.Timeout
    cancel_reason: CancelReason | None = None
    answered: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, cancel_reason: CancelReason) -> None:
        """Close its stream; the tokens received so far are kept."""
        self.cancel_reason = self.cancel_reason or cancel_reason
        self.limit(0.0)

    def limit(self, seconds: float | None) -> None:
        """End it unless a token arrives within this time; None: no time limit."""
        with suppress(RuntimeError):  # it is over, and its stream is being closed
            self.timeout.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)


class Replica:
    """One server and its running completions. `status` says whether it is given work, `proof` tracks its weights.

    Args:
        tag: prefix of its request ids, unique to the engine.
    """

    def __init__(self, address: Address, dialect: Dialect, spec: ServerSettings, tag: str) -> None:
        self.url = address.url
        self.dialect = dialect
        self.spec = spec
        self.tag = tag
        self.facts = ServerFacts(server="", model="")  # nobody has asked yet
        self.client = ServerClient(address, seconds=spec.call_seconds)
        self.proof = VersionProof(self.health)
        self.status = ReplicaState()
        # running completions were held in place, or ended; asleep: ended, and its devices are released to the trainer
        self.pause: Literal["none", "held", "stopped", "asleep"] = "none"
        self._lacks_cache = False  # after `wake`
        self.running: dict[GenerationJob, RunningCall] = {}
        self.limit = spec.max_running or FIRST_LIMIT
        self.assigned = 0  # completions
        self.scoring = 0  # scores
        self.received = 0  # tokens, ever
        self.successes = 0  # completions and scores, ever
        self._numbers = count(1)

    async def health(self) -> ServerHealth:
        """Ask the server for its health; see `Dialect.health`."""
        health = await self.dialect.health(self.client, self.facts)
        self.proof.saw(health.weight_version)
        return health

    def join(self, health: ServerHealth) -> None:
        """Enter service with its current weights."""
        self.status.joined()
        self.proof.set_version(0, health.weight_version)

    # ---- its room ----------------------------------------------------------------------------------------------------

    @property
    def in_service(self) -> bool:
        """True if it may be given work, perhaps after a break or a health check."""
        return self.status.in_service

    @property
    def ready(self) -> bool:
        """True if it may be given work now."""
        return self.status.state is State.READY and self.pause == "none"

    @property
    def has_room(self) -> bool:
        """True if it may be given one more completion now."""
        return self.ready and self.assigned < self.limit

    @property
    def has_room_to_score(self) -> bool:
        """True if it may be given one more score; scores do not wait for completions, which might never run out."""
        return self.ready and self.scoring < max(1, self.limit // 4)

    def succeeded(self) -> None:
        """Note a finished completion or score."""
        self.successes += 1
        self.status.completed()

    def adapt(self, waiting: int, *, queued: bool = False) -> None:
        """Unless the number of concurrent completions is set, make it what the server runs without queueing: fewer if
        requests wait there, but not less than half at once, as a queue may be momentary; more if none do and
        completions wait here. In a pause all requests may wait.

        Args:
            waiting: requests that the server has no room for.
            queued: completions are waiting for room.
        """
        if self.spec.max_running or self.pause != "none":
            return
        if waiting:
            self.limit = max(1, self.limit // 2, min(self.limit, len(self.running) - waiting))
        elif queued and self.assigned >= self.limit:
            self.limit = min(2 * self.limit, HIGHEST_LIMIT)

    def interrupt(self) -> None:
        """End its running completions without telling the server; the tokens received so far count."""
        for call in self.running.values():
            call.end("interrupted")

    # ---- completions -------------------------------------------------------------------------------------------------

    async def run(self, job: GenerationJob) -> CancelReason | None:
        """Run an attempt at a completion, which has begun. None if it ended by itself, with the reason in `job.reason`.

        Raises:
            ServerError: the attempt failed; the tokens received count.
            WrongAnswerError: the answer is invalid; discard it with `GenerationJob.discard`.
            UserError: a retry would not help.
        """
        idle = self.spec.idle_seconds
        uid, sample, turn = job.request.key
        name = f"{self.tag}-{uid}-{sample}-{turn}-{next(self._numbers)}"
        request = job.token_request(
            name,
            salt=self.proof.label,
            seeded=self.spec.seeded and self.facts.seeds,
            chunk_tokens=self.spec.chunk_tokens,
        )
        call = self.running[job] = RunningCall(job, asyncio.timeout(idle))
        stream = self.dialect.stream(self.client, self.facts, request)
        try:
            async with aclosing(stream) as chunks:
                async with call.timeout:
                    last = await self._read(call, chunks)
                self._over(call)
                if last is not None:
                    if last.finish_reason is not None:  # else the stop is ours, and the server goes on
                        await _read_out(chunks)
                    return None
            failure = "the completion was cut off"
        except TimeoutError:
            failure = f"no token for {idle:g} s"
        except (UserError, WrongAnswerError):
            raise
        except ValueError as error:
            raise WrongAnswerError(str(error)) from error
        finally:
            self._over(call)
        if call.cancel_reason is None:
            raise ServerError(self.url, "", failure)
        return call.cancel_reason

    async def _read(self, call: RunningCall, chunks: AsyncIterator[Chunk]) -> Chunk | None:
        """Read chunks; return the last one of the completion, None if it has not ended by itself."""
        job = call.job
        async for chunk in chunks:
            call.answered = True
            self.received += len(chunk.tokens)
            if len(chunk.tokens):
                self.status.produced()
            reason = job.append(chunk, self.proof.labels_of(job))
            if reason == "abort":
                break
            if reason is not None:
                job.reason = reason
                job.keep()
                return chunk
            if len(chunk.tokens) and self.pause != "held" and call.cancel_reason is None:
                call.limit(self.spec.idle_seconds)
        return None

    def _over(self, call: RunningCall) -> None:
        self.running.pop(call.job, None)
        call.over.set()

    async def score(self, tokens: WrittenTokens, first: int) -> Floats:
        """[T - first] float32, nats; see `Dialect.score`.

        Raises:
            ServerError: the call failed.
            WrongAnswerError: the answer is invalid.
        """
        self.scoring += 1
        try:
            scores = await self.dialect.score(self.client, self.facts, tokens, first)
        finally:
            self.scoring -= 1
        count = len(tokens.read) - first
        if len(scores) != count:
            raise WrongAnswerError(f"{len(scores)} scores of {count} tokens")
        checked = checked_log_probs(scores)
        self.succeeded()
        return checked

    # ---- pauses ------------------------------------------------------------------------------------------------------

    @property
    def in_place(self) -> bool:
        """True if it can hold running completions during a pause and, unless they finish before new weights arrive,
        reports which weights sampled which tokens."""
        facts = self.facts
        interrupt = self.spec.interrupt
        named = facts.version_spans and (interrupt == "recompute" or facts.keeps_kv)
        return facts.takes_weights and (interrupt == "finish" or named)

    async def hold(self) -> None:
        """Stop sampling; running completions are held in place.

        Raises:
            ServerError: the call failed.
        """
        await self.dialect.pause(self.client, self.facts, "keep")
        self.pause = "held"
        for call in self.running.values():
            if call.cancel_reason is None:  # the server may have left meanwhile, which ends its calls
                call.limit(None)

    async def stop(self, cancel_reason: CancelReason, which: Callable[[GenerationJob], bool] | None = None) -> None:
        """End running completions and keep their tokens: a stream that is closed ends its request. Without `which`, end
        all and pause the server, which sends their last tokens.

        Raises:
            ServerError: the call failed.
        """
        calls = [call for call in self.running.values() if which is None or which(call.job)]
        pauses = self.facts.takes_weights and which is None
        for call in calls:
            call.cancel_reason = call.cancel_reason or cancel_reason
            if not pauses or not call.answered:  # it may not even have arrived
                call.end(cancel_reason)
        if which is None and self.pause != "asleep":
            self.pause = "stopped"
        if pauses:
            await self.dialect.pause(self.client, self.facts, "abort")
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                await _all_over(calls)
        for call in calls:
            call.end(cancel_reason)
        await _all_over(calls)

    async def sleep(self) -> None:
        """Interrupt its completions, whose KV would be lost, and make it release its devices.

        Raises:
            ServerError: the call failed.
        """
        await self.stop("interrupted")
        await self.dialect.sleep(self.client, self.facts)
        self.pause = "asleep"

    async def wake(self) -> None:
        """Make it take back its devices, except for the KV cache (see `take_cache`); it stays paused.

        Raises:
            ServerError: the call failed.
        """
        self.pause = "stopped"
        self._lacks_cache = True
        await self.dialect.wake(self.client, self.facts)

    async def take_cache(self) -> None:
        """Make it take back its KV cache, if it lacks it. Call this after new weights have arrived, before a request.

        Raises:
            ServerError: the call failed.
        """
        if self._lacks_cache:
            await self.dialect.wake_cache(self.client, self.facts)
            self._lacks_cache = False

    async def resume(self) -> None:
        """Resume sampling.

        Raises:
            ServerError: the call failed.
        """
        await self.take_cache()
        if self.facts.takes_weights:
            await self.dialect.resume(self.client, self.facts)
        self.pause = "none"
        for call in self.running.values():
            if call.cancel_reason is None:
                call.limit(self.spec.idle_seconds)


async def _all_over(calls: Sequence[RunningCall]) -> None:
    for call in calls:
        await call.over.wait()


async def _read_out(chunks: AsyncIterator[Chunk]) -> None:
    """Read the rest of a completed answer, so that its connection can be reused."""
    with suppress(ServerError, ValueError, TimeoutError):
        async with asyncio.timeout(READ_OUT_SECONDS):
            async for _ in chunks:
                pass


def no_replica_left(replicas: Sequence[Replica], remedy: str) -> UserError:
    """The error for a run without a working replica."""
    reasons = "; ".join(f"{replica.url}: {replica.status.reason}" for replica in replicas)
    whose = "the server is" if len(replicas) == 1 else f"all {len(replicas)} servers are"
    condition = "out of service"
    if any(replica.in_service for replica in replicas):
        condition = "too busy or failing"
    return UserError(f"engine: {whose} {condition}: {reasons}", remedy=f"{remedy}, and resume the run (--resume)")


def gave_up(what: str, times: int, replica: Replica, error: Failure) -> UserError:
    """The error for a call that failed repeatedly."""
    counted = "once" if times == 1 else f"{times} times in a row"
    return UserError(
        f"engine: {what}: failed {counted}, the last time at {replica.url}: {error.reason}",
        remedy="look at the server's log, and resume the run (--resume)",
    )
