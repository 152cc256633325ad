"""One server, and what runs on it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from itertools import count

import numpy as np

from proxima.data import UserError
from proxima.data.columns import Floats, Ints
from proxima.engine.http.answer_checks import SLACK, WrongAnswerError
from proxima.engine.http.busy_server import BusyServer
from proxima.engine.http.client import Address, RefusedError, ServerClient, ServerError
from proxima.engine.http.dialect import Chunk, Dialect, ServerFacts, ServerHealth
from proxima.engine.http.generation_job import GenerationJob, JobSegment
from proxima.engine.http.running_call import CancelReason, RunningCall, all_over
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.http.weights_check import WeightsCheck
from proxima.engine.protocol import PauseMode

ABORT_SECONDS = 5.0  # in which a server that aborted a completion gives its last tokens
READ_OUT_SECONDS = 1.0  # for the end of an answer whose tokens have all come
REFUSALS, FRUITLESS = 3, 10  # ejections in a row without a completion, for a refused key and for anything
HEALTHY = 32  # completions after which a replica that had been ejected counts as healthy
FIRST_LIMIT, HIGHEST_LIMIT = 64, 4096  # completions at once, where the limit adapts


class Replica:
    """One server, and the completions that run on it.

    `in_service`: it may be given completions. `suspect`: a call failed, and no health check has passed since.
    `version` and `labels`: the weights that it has, and those that it has had since what runs on it began.

    Args:
        tag: begins the ids of its requests; no other engine has the same.
    """

    def __init__(self, address: Address, dialect: Dialect, facts: ServerFacts, spec: ServerSettings, tag: str) -> None:
        self.url, self.dialect, self.facts, self.spec, self.tag = address.url, dialect, facts, spec, tag
        self.client = ServerClient(address, seconds=spec.call_seconds)
        self.weights_check = WeightsCheck(lambda: self.dialect.health(self.client, self.facts), self.url)
        self.version = 0
        self.label: str | None = None
        self.proven: str | None = None  # label of the weights that it is known to compute with
        self.instance: str | None = None
        self.in_service, self.suspect, self.paused, self.held = True, False, False, False
        self.reason = ""  # why it is not in service
        self.refuses = self.confirmed = False  # it refuses our key; it did so too when it was asked to return
        self.refusals = self.fruitless = 0  # ejections for that, and all, since it last completed something
        self.busy = BusyServer()
        self.limit = spec.max_running or FIRST_LIMIT
        self.running: dict[GenerationJob, RunningCall] = {}
        self.attempts: dict[GenerationJob, int] = {}  # and segments that each had before
        self._settled = asyncio.Event()  # no weights are being proved
        self._settled.set()
        self._disproved: dict[GenerationJob, int] = {}  # attempts that went on with weights that it did not have
        self.assigned = self.scoring = 0  # completions and scores that it has been given
        self.streak = 0  # failures since the last completion
        self._failed_at = 0.0  # when the last failure that counts was noticed
        self.recent_ejections = 0  # ejections since it last worked for a while
        self.failed_returns = 0  # in a row, of those that came as far as new weights
        self.completed = 0  # since the last ejection
        self.received = 0  # tokens, ever
        self._numbers = count(1)
        self._past_labels: dict[str, int] = {}

    @property
    def ready(self) -> bool:
        """Whether it may be given work."""
        return self.in_service and not self.suspect and not self.paused and not self.busy.waiting

    @property
    def barred(self) -> bool:
        """It was ejected again and again and completed nothing between: it may not return."""
        return self.refusals >= REFUSALS or self.fruitless >= FRUITLESS

    @property
    def has_room(self) -> bool:
        """Whether it may be given one more completion now."""
        return self.ready and self.assigned < self.limit

    @property
    def has_room_to_score(self) -> bool:
        """Whether it may be given one more score; these do not wait for completions, of which there may be no end."""
        return self.ready and self.scoring < max(1, self.limit // 4)

    def failed(self, started_at: float, now: float) -> None:
        """Note a failed attempt. Attempts that fail together count once: the cause may have lasted a moment only."""
        if started_at >= self._failed_at:
            self.streak += 1
            self._failed_at = now

    def succeeded(self) -> None:
        """Note a finished completion or score."""
        self.streak = self.refusals = self.fruitless = 0
        self.busy.served()
        self.completed += 1
        if self.completed >= HEALTHY:
            self.recent_ejections = 0

    def set_version(self, version: int, label: str | None) -> None:
        """Note that it has other weights now."""
        if not self.running:
            self._past_labels.clear()
        for job in self.running:
            if job.current is not None:
                job.current.marks.append((len(job.current.tokens), version))
        self.version, self.label = version, label
        if label is not None:
            self._past_labels[label] = version

    @contextmanager
    def proving(self, version: int, label: str) -> Iterator[None]:
        """Inside, the server gets weights and passes the probe. Completions that it holds continue under the new
        weights before the result is known; if the block raises, `disproved` returns the version for them."""
        self.set_version(version, label)
        self.proven = None
        self._settled.clear()
        try:
            yield
            self.proven = label
        finally:
            if self.proven is None:
                self._disproved |= dict.fromkeys(self.attempts, version)
            self._settled.set()

    async def disproved(self, job: GenerationJob) -> int | None:
        """The version under which an attempt continued here although the server then failed the probe; None: there is
        none. Waits while a probe is running."""
        await self._settled.wait()
        return self._disproved.pop(job, None)

    def attempt_over(self, job: GenerationJob) -> None:
        """Forget an attempt that has ended."""
        del self.attempts[job]
        self._disproved.pop(job, None)

    def _labels_of(self, job: GenerationJob) -> dict[str, int]:
        """The versions that it had during an attempt, by label; empty: it does not say which it has."""
        had = {version for _, version in job.current.marks} if job.current else set()
        return {label: version for label, version in self._past_labels.items() if version in had}

    @property
    def in_place(self) -> bool:
        """It can hold what it runs in a pause, and, unless that ends before new weights come, says which tokens are of
        which weights."""
        facts, interrupt = self.facts, self.spec.interrupt
        told = facts.version_spans and interrupt in facts.interrupts
        return "keep" in facts.pause_modes and (interrupt == "finish" or told)

    # ---- completions -------------------------------------------------------------------------------------------------

    async def run(self, job: GenerationJob) -> CancelReason | None:
        """One attempt at a completion; None when it has ended by itself, and `job.reason` says how.

        Raises:
            ServerError: the attempt failed; what came of it counts.
            WrongAnswerError: what came can't be the answer; `GenerationJob.discard` it.
            UserError: no other attempt would end otherwise.
        """
        idle = self.spec.idle_seconds
        salt = self.label if self.spec.prefix_salt and self.facts.cache_salt else None
        uid, sample, turn = job.key
        name = f"{self.tag}-{uid}-{sample}-{turn}-{next(self._numbers)}"
        request = job.token_request(
            name, salt=salt, seeded=self.spec.seeded and self.facts.seeds, chunk_tokens=self.spec.chunk_tokens
        )
        job.begin(self.version)
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
        """Take what comes; returns the chunk with which the completion ended, None if it has not."""
        job = call.job
        async for chunk in chunks:
            call.answered = True
            self.received += len(chunk.tokens)
            if len(chunk.tokens):
                self.busy.served()
            reason = job.append(chunk, self._labels_of(job))
            if reason == "abort":
                break
            if reason is not None:
                job.reason = reason
                job.keep()
                return chunk
            if len(chunk.tokens) and not self.held and call.cancel_reason is None:
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
                found = await self.dialect.score(self.client, self.facts, prompt, tokens)
        except TimeoutError:
            raise ServerError(self.url, "", f"no scores for {self.spec.idle_seconds:g} s") from None
        finally:
            self.scoring -= 1
        if len(found) != len(tokens):
            raise WrongAnswerError(f"{len(found)} scores of {len(tokens)} tokens")
        if not np.isfinite(found).all() or (len(found) and found.max() > SLACK):
            raise WrongAnswerError("a score is not a finite log-prob")
        self.succeeded()
        return found

    # ---- pauses ------------------------------------------------------------------------------------------------------

    async def hold(self) -> None:
        """Stop sampling; what runs stays where it is.

        Raises:
            ServerError: it can't be told to.
        """
        await self.dialect.pause(self.client, self.facts, "keep")
        self.paused = self.held = True
        for call in self.running.values():
            call.limit(None)

    async def stop(self, cancel_reason: CancelReason, which: Callable[[GenerationJob], bool] | None = None) -> None:
        """End what runs, and keep its tokens; all of it: then the server is paused.

        Raises:
            ServerError: it can't be told to.
        """
        calls = [call for call in self.running.values() if which is None or which(call.job)]
        for call in calls:
            call.cancel_reason = call.cancel_reason or cancel_reason
        modes = self.facts.pause_modes
        if which is None:
            self.paused = True
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
                await all_over(calls)
        for call in calls:
            call.end(cancel_reason)
        await all_over(calls)

    def drop(self) -> None:
        """End what runs without telling the server; the tokens received so far count."""
        for call in self.running.values():
            call.end("interrupted")

    async def resume(self) -> None:
        """Sample again.

        Raises:
            ServerError: it can't be told to.
        """
        if self.facts.pause_modes:
            await self.dialect.resume(self.client, self.facts)
        self.paused = self.held = False
        for call in self.running.values():
            if call.cancel_reason is None:
                call.limit(self.spec.idle_seconds)

    # ---- health ------------------------------------------------------------------------------------------------------

    def problem(self, health: ServerHealth, label: str | None) -> str | None:
        """What is wrong with the state that the server reports; None: nothing.

        Args:
            label: of the weights that it should have; None: they are changing.
        """
        if health.model is not None and health.model != self.facts.model:
            return f"it serves {health.model} now, not {self.facts.model}"
        if health.instance is not None and self.instance is not None and health.instance != self.instance:
            return "it was started again"
        if label is not None and self.facts.weight_version and health.weight_version != label:
            return f"it has weights {health.weight_version!r}, not {label!r}"
        return None

    @property
    def running_segments(self) -> list[JobSegment]:
        """What the unfinished attempts here have given so far, where that is at least one token."""
        return [one for job, since in self.attempts.items() for one in job.since(since) if one.tokens]

    async def confirm(self, label: str | None, seconds: float) -> str | None:
        """Ask the server whether it still has weights `label`, by which it has sampled and scored.

        Args:
            seconds: deadline of the answer.

        Returns: why this is not confirmed; None: it is.
        """
        if not self.facts.weight_version:  # then it takes no weights either
            return None
        segments = self.running_segments
        try:
            problem = self.problem(await self.weights_check.ask(seconds), label)
        except (ServerError, RefusedError) as error:
            return f"nobody knows which weights it had: {error.reason}"
        if problem is None:
            mark_confirmed(segments)
        return problem

    def leave_service(self, reason: str, *, refuses: bool) -> None:
        """Note that it was ejected, and end what it runs."""
        self.refusals += refuses
        self.fruitless += 1
        self.recent_ejections += 1
        self.completed = 0
        if self.barred:
            times = self.refusals if refuses else self.fruitless
            reason = f"{reason} ({times} times in a row, without a completion between)"
        self.in_service, self.reason, self.refuses, self.confirmed = False, reason, refuses, self.barred
        self.drop()

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


async def _read_out(chunks: AsyncIterator[Chunk]) -> None:
    """Read the rest of an answer that is complete, so that its connection serves another call."""
    with suppress(ServerError, ValueError, TimeoutError):
        async with asyncio.timeout(READ_OUT_SECONDS):
            async for _ in chunks:
                pass


def mark_confirmed(segments: Sequence[JobSegment]) -> None:
    """Note that the server which runs these has the weights that it should have."""
    for segment in segments:
        segment.confirmed = True
