"""Tracks a server's weights: those it was given, those it reports, and those it was found to compute with.

A restarted server has its initial weights, under another label, until it is given ours. So if it reports our label,
everything it has sampled since it was given our weights is from these weights: one answer confirms every completion
that ended, or produced a token, before the question. A label proves nothing about the values of the weights:
`weight_probe.py` checks those.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from proxima.engine.http.client import RefusedError, ServerError
from proxima.engine.http.dialect import ServerFacts, ServerHealth
from proxima.engine.http.generation_job import GenerationJob, JobSegment


class SharedQuestion:
    """Shares health checks of a server among callers: those that arrive while a check is running share the next one.

    Args:
        ask: the health check.
        url: of the server, for messages.
    """

    def __init__(self, ask: Callable[[], Awaitable[ServerHealth]], url: str) -> None:
        self._ask, self._url = ask, url
        self._next: asyncio.Task[ServerHealth] | None = None  # not sent yet
        self._asking = asyncio.Lock()

    async def ask(self, seconds: float) -> ServerHealth:
        """Return the result of a health check that is sent after this call.

        Args:
            seconds: deadline of the question.

        Raises:
            ServerError, RefusedError: the check failed.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._send(seconds))
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody waits
        return await asyncio.shield(self._next)  # others may wait for it too

    async def _send(self, seconds: float) -> ServerHealth:
        async with self._asking:
            self._next = None
            try:
                async with asyncio.timeout(seconds):
                    return await self._ask()
            except TimeoutError:
                raise ServerError(self._url, "", f"no answer to a health check for {seconds:g} s") from None

    async def answered(self) -> None:
        """Wait for the answers to all earlier callers: new weights must not be loaded between question and answer."""
        if self._next is not None:
            await asyncio.wait({self._next})
        async with self._asking:
            pass


class ProvedServer(Protocol):
    """The part of a replica that its proof uses; `running` has the completions being sampled."""

    url: str
    facts: ServerFacts

    @property
    def running(self) -> Mapping[GenerationJob, object]: ...

    async def health(self) -> ServerHealth: ...


class VersionProof:
    """The known facts about the weights of one replica.

    `version` and `label`: the weights that it was given last. `attempts`: its running completions, and the number of
    segments each had before.
    """

    def __init__(self, server: ProvedServer) -> None:
        self._server = server
        self.question = SharedQuestion(server.health, server.url)
        self.version = 0
        self.label: str | None = None
        self.attempts: dict[GenerationJob, int] = {}
        self._past_labels: dict[str, int] = {}  # weights that it has had since its running completions started
        self._settled = asyncio.Event()  # no weights are being proved
        self._settled.set()

    # ---- what it was given -------------------------------------------------------------------------------------------

    def set_version(self, version: int, label: str | None) -> None:
        """Record that it now has other weights."""
        running = self._server.running
        if not running:
            self._past_labels.clear()
        for job in running:
            if job.current is not None:
                job.current.marks.append((len(job.current.tokens), version))
        self.version, self.label = version, label
        if label is not None:
            self._past_labels[label] = version

    @contextmanager
    def proving(self, version: int, label: str) -> Iterator[None]:
        """Wrap loading weights into the server and probing them. Held completions continue under the new weights before
        the result is known; if the block raises, tokens that they attribute to `version` are `mismatched`."""
        self.set_version(version, label)
        self._settled.clear()
        try:
            yield
        except BaseException:
            for segment in self._segments():
                segment.mismatched.add(version)
            raise
        finally:
            self._settled.set()

    async def settled(self) -> None:
        """Wait while weights are being proved."""
        await self._settled.wait()

    # ---- what it names -----------------------------------------------------------------------------------------------

    def labels_of(self, job: GenerationJob) -> dict[str, int]:
        """The versions that it had during an attempt, by label; empty: it does not report labels."""
        had = {version for _, version in job.current.marks} if job.current else set()
        return {label: version for label, version in self._past_labels.items() if version in had}

    def problem(self, health: ServerHealth, label: str | None) -> str | None:
        """Describe what is wrong with the state that the server reports; None: nothing.

        Args:
            label: label of the weights that it should have; None: they are changing.
        """
        facts = self._server.facts
        if health.model is not None and health.model != facts.model:
            return f"it serves {health.model} now, not {facts.model}"
        if label is not None and health.weight_version != label:
            return f"it has weights {health.weight_version!r}, not {label!r}"
        return None

    async def confirm(self, label: str | None, seconds: float) -> str | None:
        """Ask the server whether it still has the weights `label`, with which it has sampled and scored.

        Args:
            seconds: deadline of the answer.

        Returns: the reason why it is not confirmed; None: it is.
        """
        if label is None:  # it does not report its weights, and so accepts no new ones
            return None
        segments = self.unverified()
        try:
            problem = self.problem(await self.question.ask(seconds), label)
        except (ServerError, RefusedError) as error:
            return f"its weights could not be confirmed: {error.reason}"
        if problem is None:
            mark_confirmed(segments)
        return problem

    def unverified(self) -> list[JobSegment]:
        """The segments of running attempts that already have a token: a later answer covers these."""
        return [segment for segment in self._segments() if segment.tokens]

    def _segments(self) -> list[JobSegment]:
        return [segment for job, since in self.attempts.items() for segment in job.since(since)]


def mark_confirmed(segments: list[JobSegment]) -> None:
    """Mark segments as sampled by a server that has the weights it should have."""
    for segment in segments:
        segment.confirmed = True
