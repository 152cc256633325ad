"""One server, and what runs on it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Literal
from zlib import crc32

import numpy as np

from proxima.data import UserError
from proxima.data.columns import Floats, Ints
from proxima.engine.http.answer_checks import SLACK, WrongAnswerError
from proxima.engine.http.client import Address, RefusedError, ServerClient, ServerError, busy_seconds
from proxima.engine.http.dialect import Chunk, Dialect, ServerFacts, ServerHealth
from proxima.engine.http.generation_job import GenerationJob
from proxima.engine.http.replica_states import IN_SERVICE, TRANSITIONS, Action, Event, State
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.http.version_proof import VersionProof
from proxima.engine.protocol import PauseMode

ABORT_SECONDS = 5.0  # in which a server that aborted a completion gives its last tokens
READ_OUT_SECONDS = 1.0  # for the end of an answer whose tokens have all come
REFUSALS, FRUITLESS = 3, 10  # ejections in a row without a completion, for a refused key and for anything
HEALTHY = 32  # completions after which a replica that had been ejected counts as healthy
FIRST_LIMIT, HIGHEST_LIMIT = 64, 4096  # completions at once, where the limit adapts

CancelReason = Literal["interrupted", "aborted"]
Failure = ServerError | WrongAnswerError | RefusedError  # of a call that may succeed at another server


@dataclass(eq=False)
class RunningCall:
    """A completion that a server is generating.

    Args:
        name: the id of its request.
        timeout: ends it when no token comes.
        cancel_reason: why it was cancelled before the completion ended; None: it was not.
        answered: a chunk has come.
        timed: the timeout runs; one that has ended can't be moved.
    """

    job: GenerationJob
    name: str
    timeout: asyncio.Timeout
    cancel_reason: CancelReason | None = None
    answered: bool = False
    timed: bool = True
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, cancel_reason: CancelReason) -> None:
        """Close the stream; the tokens received so far count."""
        self.cancel_reason = self.cancel_reason or cancel_reason
        self.limit(0.0)

    def limit(self, seconds: float | None) -> None:
        """End the call unless a token arrives within `seconds`; None: no limit."""
        if self.timed and not self.timeout.expired():
            now = asyncio.get_running_loop().time()
            self.timeout.reschedule(None if seconds is None else now + seconds)


class Replica:
    """One server, and the completions that run on it. `state` is one of `replica_states`; `proof` has its weights.

    Args:
        tag: begins the ids of its requests; no other engine has the same.
    """

    def __init__(self, address: Address, dialect: Dialect, spec: ServerSettings, tag: str) -> None:
        self.url, self.dialect, self.spec, self.tag = address.url, dialect, spec, tag
        self.facts = ServerFacts(server="", model="")  # nobody has asked yet
        self.client = ServerClient(address, seconds=spec.call_seconds)
        self.proof = VersionProof(self)
        self.state = State.NEW
        self.reason = ""  # why it is not in service
        self.pause: Literal["none", "held", "stopped"] = "none"  # what runs was held in place, or ended
        self.asleep = False  # its devices are left to the trainer
        self.running: dict[GenerationJob, RunningCall] = {}
        self.limit = spec.max_running or FIRST_LIMIT
        self.assigned = self.scoring = 0  # completions and scores that it has been given
        self.completed = 0  # since the last ejection
        self.received = 0  # tokens, ever
        self.streak = 0  # failures since the last completion
        self._failed_at = 0.0  # when the last failure that counts was noticed
        self.refusals = self.fruitless = 0  # ejections for a refused key, and all, since it last completed something
        self.recent_ejections = 0  # ejections since it last worked for a while
        self.failed_returns = 0  # in a row, of those that came as far as new weights
        self.busy_since: float | None = None  # it has served nothing from then on
        self.busy_times, self.busy_reason = 0, ""  # in a row
        self._numbers = count(1)

    async def health(self) -> ServerHealth:
        """Its answer to a health check; see `Dialect.health`."""
        return await self.dialect.health(self.client, self.facts)

    # ---- its state ---------------------------------------------------------------------------------------------------

    def move(self, event: Event) -> Action:
        """Enter the next state, and return the action for the pool."""
        self.state, action = TRANSITIONS[self.state, event]
        return action

    def join(self, health: ServerHealth) -> None:
        """Enter service, with the weights that it has."""
        self.move(Event.JOINED)
        self.proof.instance = health.instance
        self.proof.set_version(0, health.weight_version)

    def stay_away(self, reason: str) -> None:
        """Note that it could not enter service, and why."""
        self.move(Event.ABSENT)
        self.reason = reason

    @property
    def in_service(self) -> bool:
        """True if it may be given work, perhaps after a break or a health check."""
        return self.state in IN_SERVICE

    @property
    def ready(self) -> bool:
        """True if it may be given work now."""
        return self.state is State.READY and self.pause == "none"

    @property
    def has_room(self) -> bool:
        """True if it may be given one more completion now."""
        return self.ready and self.assigned < self.limit

    @property
    def has_room_to_score(self) -> bool:
        """True if it may be given one more score; scores do not wait for completions, which may never end."""
        return self.ready and self.scoring < max(1, self.limit // 4)

    @property
    def refuses_key(self) -> bool:
        """True if it is out of service because it refuses our key."""
        return self.state in (State.REFUSING, State.LOCKED) or self.refusals >= REFUSALS

    def failed(self, started_at: float, now: float) -> None:
        """Note a failed attempt. Attempts that fail together count once: the cause may have been momentary."""
        if started_at >= self._failed_at:
            self.streak += 1
            self._failed_at = now

    def served(self) -> None:
        """Note that it has made progress."""
        self.busy_since, self.busy_times = None, 0

    def succeeded(self) -> None:
        """Note a finished completion or score."""
        self.streak = self.refusals = self.fruitless = 0
        self.served()
        self.completed += 1
        if self.completed >= HEALTHY:
            self.recent_ejections = 0

    def overloaded(self, since: float, reason: str) -> None:
        """Note that it is overloaded, since `since` if it had made progress before."""
        self.busy_since = since if self.busy_since is None else self.busy_since
        self.busy_reason = reason

    def break_seconds(self, retry_after: float | None) -> float:
        """Count another consecutive refusal, and return the seconds to wait before the next request."""
        self.busy_times += 1
        return busy_seconds(self.busy_times, retry_after, crc32(self.url.encode()))

    def leave(self, reason: str) -> None:
        """Note that it was ejected, and end what it runs; `HOPELESS` follows where that was too often."""
        refused = self.state is State.REFUSING
        self.refusals += refused
        self.fruitless += 1
        self.recent_ejections += 1
        self.completed = 0
        self.reason = reason
        if self.refusals >= REFUSALS or self.fruitless >= FRUITLESS:
            times = self.refusals if refused else self.fruitless
            self.reason = f"{reason} ({times} times in a row, without a completion between)"
            self.move(Event.HOPELESS)
        for call in self.running.values():  # without telling the server; the tokens received so far count
            call.end("interrupted")

    def returned(self) -> None:
        """Note that it is back in service."""
        self.streak, self.failed_returns, self.reason = 0, 0, ""

    def adapt(self, health: ServerHealth, queued: bool) -> None:
        """Set how many completions run here at once: fewer when the server has a queue, more when it has none and there
        are more to run.

        Args:
            queued: completions wait for room.
        """
        if self.spec.max_running:
            return
        if health.waiting:
            self.limit = max(1, min(self.limit, len(self.running)) - health.waiting)
        elif queued and self.assigned >= self.limit:
            self.limit = min(2 * self.limit, HIGHEST_LIMIT)

    # ---- completions -------------------------------------------------------------------------------------------------

    async def run(self, job: GenerationJob) -> CancelReason | None:
        """One attempt at a completion; None when it has ended by itself, and `job.reason` says how.

        Raises:
            ServerError: the attempt failed; what came of it counts.
            WrongAnswerError: what came can't be the answer; `GenerationJob.discard` it.
            UserError: no other attempt would end otherwise.
        """
        idle = self.spec.idle_seconds
        salt = self.proof.label if self.spec.prefix_salt and self.facts.cache_salt else None
        uid, sample, turn = job.key
        name = f"{self.tag}-{uid}-{sample}-{turn}-{next(self._numbers)}"
        request = job.token_request(
            name, salt=salt, seeded=self.spec.seeded and self.facts.seeds, chunk_tokens=self.spec.chunk_tokens
        )
        job.begin(self.proof.version)
        call = self.running[job] = RunningCall(job, name, asyncio.timeout(idle))
        stream = self.dialect.stream(self.client, self.facts, request)
        try:
            async with aclosing(stream) as chunks:  # type: ignore[type-var]
                try:
                    async with call.timeout:
                        last = await self._read(call, chunks)
                finally:
                    call.timed = False  # while the stream is being closed somebody may still want to end it
                self._over(call)
                if last is not None and last.finish_reason is not None:
                    await _read_out(chunks)
            if last is not None:
                return None
            if call.cancel_reason is None:
                raise ServerError(self.url, "", "the completion broke off")
            return call.cancel_reason
        except TimeoutError:
            if call.cancel_reason is None:
                raise ServerError(self.url, "", f"no token for {idle:g} s") from None
            return call.cancel_reason
        except (UserError, WrongAnswerError):
            raise
        except (ValueError, OverflowError) as error:
            raise WrongAnswerError(str(error)) from error
        finally:
            self._over(call)

    async def _read(self, call: RunningCall, chunks: AsyncIterator[Chunk]) -> Chunk | None:
        """Read the chunks; returns the one that ended the completion, None if none did."""
        job = call.job
        async for chunk in chunks:
            call.answered = True
            self.received += len(chunk.tokens)
            if len(chunk.tokens):
                self.served()
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

    async def score(self, prompt: Ints, tokens: Ints) -> Floats:
        """[T] float32, nats: log-probs of `tokens` after `prompt` under softmax(logits).

        Raises:
            ServerError: the call failed.
            WrongAnswerError: what came can't be the answer.
        """
        self.scoring += 1
        try:
            async with asyncio.timeout(self.spec.idle_seconds):
                scores = await self.dialect.score(self.client, self.facts, prompt, tokens)
        except TimeoutError:
            raise ServerError(self.url, "", f"no scores for {self.spec.idle_seconds:g} s") from None
        finally:
            self.scoring -= 1
        if len(scores) != len(tokens):
            raise WrongAnswerError(f"{len(scores)} scores of {len(tokens)} tokens")
        if not np.isfinite(scores).all() or (len(scores) and scores.max() > SLACK):
            raise WrongAnswerError("a score is not a finite log-prob")
        self.succeeded()
        return scores

    # ---- pauses ------------------------------------------------------------------------------------------------------

    @property
    def in_place(self) -> bool:
        """True if it can hold its completions in a pause and, unless they end before new weights arrive, say which
        tokens are of which weights."""
        facts, interrupt = self.facts, self.spec.interrupt
        named = facts.version_spans and interrupt in facts.interrupts
        return "keep" in facts.pause_modes and (interrupt == "finish" or named)

    async def hold(self) -> None:
        """Stop sampling; running completions stay in place.

        Raises:
            ServerError: it can't be told to.
        """
        await self.dialect.pause(self.client, self.facts, "keep")
        self.pause = "held"
        for call in self.running.values():
            call.limit(None)

    async def stop(self, cancel_reason: CancelReason, which: Callable[[GenerationJob], bool] | None = None) -> None:
        """End running completions and keep their tokens; if all are ended, the server is paused.

        Raises:
            ServerError: it can't be told to.
        """
        calls = [call for call in self.running.values() if which is None or which(call.job)]
        for call in calls:
            call.cancel_reason = call.cancel_reason or cancel_reason
        modes = self.facts.pause_modes
        if which is None:
            self.pause = "stopped"
        if which is None and modes:
            mode: PauseMode = "abort" if "abort" in modes else min(modes)
            for call in calls if mode != "abort" else ():
                call.end(cancel_reason)
            await self.dialect.pause(self.client, self.facts, mode)
        elif calls:
            await self.dialect.abort(self.client, self.facts, [call.name for call in calls])
        for call in calls:
            if not call.answered:  # it may not even have arrived
                call.end(cancel_reason)
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                await _all_over(calls)
        for call in calls:
            call.end(cancel_reason)
        await _all_over(calls)

    async def resume(self) -> None:
        """Resume sampling.

        Raises:
            ServerError: it can't be told to.
        """
        if self.facts.pause_modes:
            await self.dialect.resume(self.client, self.facts)
        self.pause = "none"
        for call in self.running.values():
            if call.cancel_reason is None:
                call.limit(self.spec.idle_seconds)


async def _all_over(calls: Sequence[RunningCall]) -> None:
    for call in calls:
        await call.over.wait()


async def _read_out(chunks: AsyncIterator[Chunk]) -> None:
    """Read the rest of an answer that is complete, so that its connection serves another call."""
    with suppress(ServerError, ValueError, TimeoutError):
        async with asyncio.timeout(READ_OUT_SECONDS):
            async for _ in chunks:
                pass


def no_replica_left(replicas: Sequence[Replica], remedy: str = "start it again") -> UserError:
    """The error that no replica works."""
    reasons = "; ".join(f"{replica.url}: {replica.reason}" for replica in replicas)
    whose = "the server is" if len(replicas) == 1 else f"all {len(replicas)} servers are"
    return UserError(f"engine: {whose} out of service: {reasons}", remedy=f"{remedy}, and resume the run (--resume)")


def too_busy(replicas: Sequence[Replica], seconds: float) -> UserError:
    """The error that servers answer, but make no progress."""
    reasons = "; ".join(f"{replica.url}: {replica.busy_reason}" for replica in replicas)
    remedy = "lower engine.max_running or raise engine.away_seconds, and resume the run (--resume)"
    return UserError(f"engine: too busy for a completion for {seconds:g} s: {reasons}", remedy=remedy)


def gave_up(what: str, times: int, replica: Replica, error: Failure) -> UserError:
    """The error that a call failed repeatedly."""
    counted = "once" if times == 1 else f"{times} times in a row"
    return UserError(
        f"engine: {what}: failed {counted}, the last time at {replica.url}: {error.reason}",
        remedy="look at the server's log, and resume the run (--resume)",
    )
