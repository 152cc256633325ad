"""Tracks a server's weights: those it was given, those it reports, and those it was found to compute with.

A restarted server has its initial weights, under another label, until it is given ours. So if it reports our label,
everything it has sampled since it was given our weights is from these weights: one answer confirms every completion
that ended, or produced a token, before the question. A label proves nothing about the values of the weights:
`weights/probe.py` checks those.

Another run may send weights to the same server, which breaks no connection. So every completion is confirmed up to its
last token, unless it names its weights itself; and what ran when weights were given again, and was not confirmed
before, is confirmed by no later answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from proxima.engine.http.answer_checks import WrongAnswerError
from proxima.engine.http.client import RefusedError
from proxima.engine.http.dialect import ServerHealth
from proxima.engine.http.generation_job import GenerationJob, JobSegment
from proxima.engine.http.run_labels import run_of
from proxima.engine.protocol import ServerError

Part = tuple[JobSegment, int]  # its first tokens, so many


class VersionProof:
    """The known facts about the weights of one replica.

    `version` and `label`: the weights that it was given last, and `given`, how often it was given any. `attempts`: the
    segments that it is generating. `run`: this run, by `run_labels`. `rival`: the label of another run whose weights
    have come to it since an earlier answer, so that this run is going on.

    Args:
        health: asks the server for its health.
    """

    def __init__(self, health: Callable[[], Awaitable[ServerHealth]]) -> None:
        self._health = health
        self.version = 0
        self.label: str | None = None
        self.given = 0
        self.run: str | None = None
        self.rival: str | None = None
        self._seen: str | None = None  # the label that it reported last
        self.attempts: list[JobSegment] = []
        self._past_labels: dict[str, int] = {}  # weights that it has had since the attempts started
        self.settled = asyncio.Event()  # no weights are being proved
        self.settled.set()
        self._next: asyncio.Task[ServerHealth] | None = None  # a health check that is not sent yet
        self._asking = asyncio.Lock()

    # ---- what it was given -------------------------------------------------------------------------------------------

    def set_version(self, version: int, label: str | None) -> None:
        """Record that it now has other weights."""
        if not self.attempts:
            self._past_labels.clear()
        for segment in self.attempts:
            segment.marks.append((len(segment.tokens), version))
        self.version = version
        self.label = label
        self.given += 1
        if label is not None:
            self._past_labels[label] = version

    @contextmanager
    def proving(self, version: int, label: str) -> Iterator[None]:
        """Wrap loading weights into the server and probing them. Held completions continue under the new weights before
        the result is known; if the block raises, tokens that they attribute to `version` are `mismatched`."""
        self.set_version(version, label)
        self.settled.clear()
        try:
            yield
        except BaseException:
            for segment in self.attempts:
                segment.mismatched.add(version)
            raise
        finally:
            self.settled.set()

    # ---- what it names -----------------------------------------------------------------------------------------------

    def labels_of(self, job: GenerationJob) -> dict[str, int]:
        """The versions that it had during an attempt, by label; empty: it does not report labels."""
        if job.current:
            had = {version for _, version in job.current.marks}
        else:
            had = set()
        return {label: version for label, version in self._past_labels.items() if version in had}

    def saw(self, label: str | None) -> None:
        """Note the label that the server reports."""
        if label is None:
            return
        before = self._seen
        self._seen = label
        if before in (None, label):
            return
        run = run_of(label)
        if run == self.run:
            self.rival = None
        elif run is not None:
            self.rival = label

    def problem(self, health: ServerHealth, label: str | None) -> str | None:
        """Describe what is wrong with the weights that the server reports; None: nothing.

        Args:
            label: label of the weights that it should have; None: they are changing.
        """
        if label is not None and health.weight_version != label:
            return f"it has weights {health.weight_version!r}, not {label!r}"
        return None

    async def ask(self, seconds: float | None = None) -> ServerHealth:
        """Return the result of a health check that is sent after this call. Calls that come during one share the next.

        Args:
            seconds: deadline of the check; None: that of any call.

        Raises:
            ServerError, RefusedError, TimeoutError: the check failed.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._send(seconds))
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody waits
        return await asyncio.shield(self._next)  # others may wait for it too

    async def _send(self, seconds: float | None) -> ServerHealth:
        async with self._asking:
            self._next = None
            async with asyncio.timeout(seconds):  # a later question must not wait for a server that hangs
                return await self._health()

    async def answered(self) -> None:
        """Wait for the answers to all earlier calls: new weights must not be loaded between question and answer."""
        if self._next is not None:
            await asyncio.wait({self._next})
        async with self._asking:
            pass

    async def confirm(self, label: str | None, seconds: float | None = None) -> None:
        """Ask the server whether it still has the weights `label`, with which it has sampled and scored.

        Args:
            seconds: as for `ask`.

        Raises:
            WrongAnswerError: this could not be confirmed.
        """
        if label is None:  # it does not report its weights, and so accepts no new ones
            return
        parts = self.unverified()
        try:
            problem = self.problem(await self.ask(seconds), label)
        except TimeoutError as error:
            raise WrongAnswerError("its weights could not be confirmed in time") from error
        except (ServerError, RefusedError) as error:
            raise WrongAnswerError(f"its weights could not be confirmed: {error.reason}") from error
        if problem is not None:
            raise WrongAnswerError(problem)
        mark_confirmed(parts)

    def unverified(self) -> list[Part]:
        """What the running attempts have sampled so far: a later answer covers it, until weights are given again."""
        return [(segment, len(segment.tokens)) for segment in self.attempts if len(segment.marks) == 1]


def mark_confirmed(parts: Sequence[Part]) -> None:
    """Mark tokens as sampled by a server that has the weights it should have."""
    for segment, length in parts:
        segment.confirmed = max(segment.confirmed, length)
