"""Processes that do many jobs at once: episodes of agents, or calls of environments of another library.

They speak the protocol of `agent_process`. A job that is late is cancelled alone. A process that does not let it end is
killed, and its other jobs may be done again in the process that replaces it.
"""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from itertools import count
from queue import SimpleQueue
from typing import Any

from proxima.environment.episode_clock import EpisodeClock
from proxima.environment.hosts import EnvironmentFailure
from proxima.process.program import Program, ProgramFailed, line_of
from proxima.system.machine import usable_cores

GRACE_SECONDS = 10.0  # in which a job that is cancelled must end
LOAD_SECONDS = 1800.0  # in which a process must load what it works with, data included
JOBS_EACH = 16  # of a process, before another one starts, where the recipe gives no number
ANSWERS = {"reward", "value", "error", "stopping"}  # what a message about a job has one of


class JobFailed(EnvironmentFailure):
    """A job that did not end when it was cancelled; it alone has failed."""


class JobProcesses:
    """Processes, as many as there is work for.

    Args:
        command: program and arguments of a process.
        workers: number of processes; 0: one for each JOBS_EACH jobs at once, at most as many as cores.
        name: of a process, in messages.
        grace: seconds in which a job that is cancelled must end.
    """

    def __init__(
        self, command: Sequence[str], workers: int, name: str = "the agent's process", grace: float = GRACE_SECONDS
    ) -> None:
        self.command = tuple(command)
        self.name = name
        self.grace = grace
        self._most = workers or max(1, usable_cores())
        self._each = 1 if workers else JOBS_EACH
        self._running: list[JobProcess] = []
        self._retired: list[JobProcess] = []

    def process(self) -> "JobProcess":
        """The process with the least work, or a new one."""
        self._retired += [process for process in self._running if process.retired and not process.ended]
        self._running = [process for process in self._running if not process.retired]
        self._retired = [process for process in self._retired if not process.ended]
        least = min(self._running, key=lambda process: process.load, default=None)
        if least is None or (least.load >= self._each and len(self._running) < self._most):
            least = JobProcess(self.command, self.name, self.grace)
            self._running.append(least)
        return least

    def close(self) -> None:
        """Kill the processes, whatever they are doing. May be called twice."""
        for process in (*self._running, *self._retired):
            process.end()


class JobProcess:
    """A single process, from start to end, for one event loop at a time.

    Attributes:
        waiting: the jobs in progress, by number.
        stopping: those that were cancelled and have not ended; True: their event loop has been told.
        retired: it gets no more jobs, and ends with the last one that it has.
    """

    def __init__(self, command: Sequence[str], name: str = "the agent's process", grace: float = GRACE_SECONDS) -> None:
        self.name = name
        self.grace = grace
        self.waiting: dict[int, Future[dict[str, Any]]] = {}
        self.stopping: dict[int, bool] = {}
        self.ended = False
        self.retired = False
        self._ready: Future[None] = Future()
        self._numbers = count()
        self._held = 0
        self._lock = threading.Lock()  # a job given after the end would wait for an answer that nobody reads
        self._program = Program(command, name=name, guarded=True)
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()  # a process that is busy may not read for long
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    @property
    def load(self) -> int:
        """The jobs in progress, or the episodes of an environment whose calls are jobs."""
        return max(self._held, len(self.waiting))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the process, also a retired one, for an episode that has its state there, in the block."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self._end_if_retired()

    async def ask(self, job: Mapping[str, Any], clock: EpisodeClock) -> dict[str, Any]:
        """Do a job, and return its outcome, see `agent_process`.

        Args:
            job: JSON values.
            clock: waiting for the process to start is `queued`.
        Raises:
            EnvironmentFailure: the process has ended; JobFailed: because of this job.
        """
        number = next(self._numbers)
        answered = Future[dict[str, Any]]()
        with self._lock:
            if self.ended or (self.retired and not self._held):
                raise EnvironmentFailure(f"another episode ended {self.name}", collateral=True)
            self.waiting[number] = answered
        try:
            with clock.queued():
                await self._started()
            return await self._answer(number, job, clock, answered)
        finally:
            self.waiting.pop(number, None)
            self._end_if_retired()

    def tell(self, job: Mapping[str, Any]) -> None:
        """Do a job whose outcome nobody waits for."""
        self._send({"id": next(self._numbers), **job})

    async def _answer(
        self, number: int, job: Mapping[str, Any], clock: EpisodeClock, answered: "Future[dict[str, Any]]"
    ) -> dict[str, Any]:
        self._send({"id": number, **job})
        answer = asyncio.wrap_future(answered)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may come after the end
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._cancel(number)
            if clock.late:  # else it is the end of the run
                with suppress(JobFailed):  # its own; that of another says that this one had no chance
                    await asyncio.shield(answer)
            raise

    async def _started(self) -> None:
        """Wait until the process has loaded what it plays with."""
        try:
            async with asyncio.timeout(LOAD_SECONDS):  # `wait_for` of Python 3.11 may swallow that it is cancelled
                await asyncio.shield(asyncio.wrap_future(self._ready))
        except TimeoutError:
            self.end()
            raise EnvironmentFailure(f"{self.name} was not ready after {LOAD_SECONDS:g} s") from None

    def _cancel(self, number: int) -> None:
        """Cancel a job; what ignores that for long is left to itself, or ends the process."""
        if self.ended:
            return
        self.stopping[number] = False
        self._send({"cancel": number, "seconds": self.grace})
        timer = threading.Timer(2 * self.grace, self._overdue, [number])
        timer.daemon = True
        timer.start()

    def _overdue(self, number: int) -> None:
        if number not in self.stopping:
            return
        if not self.stopping[number]:
            self._kill_for(number)
            return
        self.retired = True
        self._fail(number, JobFailed("it ignored that it was cancelled"))
        self.stopping.pop(number, None)
        self._end_if_retired()

    def _kill_for(self, number: int) -> None:
        """Kill the process because one of its jobs keeps it busy; that one alone has failed."""
        why = f"it kept {self.name} busy for {self.grace:g} s, so that the process was killed"
        self._fail(number, JobFailed(why))
        self._end_with(EnvironmentFailure(f"another episode kept {self.name} busy, which was killed", collateral=True))

    def _fail(self, number: int, failure: EnvironmentFailure) -> None:
        answered = self.waiting.pop(number, None)
        if answered is not None:
            answered.set_exception(failure)

    def _end_with(self, failure: EnvironmentFailure) -> None:
        """End the process; all its jobs fail."""
        with self._lock:
            self.end()
            unanswered = self.waiting
            self.waiting = {}
        for answered in unanswered.values():
            answered.set_exception(failure)
        with suppress(InvalidStateError):
            self._ready.set_exception(failure)

    def _end_if_retired(self) -> None:
        if self.retired and not self.waiting and not self._held:
            self.end()

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message, without waiting until the process reads it."""
        self._lines.put(line_of(message))

    def _write(self) -> None:
        """Write what is sent until the process ends."""
        while (line := self._lines.get()) is not None:
            self._program.write_line(line)

    def _read(self) -> None:
        """Forward answers until the process ends; then fail all jobs still in progress."""
        try:
            while True:
                self._received(self._program.read())
        except ProgramFailed as error:
            self._end_with(EnvironmentFailure(str(error), collateral=len(self.waiting) > 1))

    def _received(self, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            with suppress(InvalidStateError):  # it has said so before
                self._ready.set_result(None)
            return
        if "held_by" in message:
            holder = message["held_by"]
            if holder is not None and not isinstance(holder, int):
                raise ProgramFailed(f"{self._program.name} wrote something that is not an answer")
            if holder is None:  # one that was cancelled, and whose event loop has not been told
                stopping = list(self.stopping.items())  # another thread may change it
                holder = next((number for number, told in stopping if not told), None)
            if holder is not None:
                self._kill_for(holder)
            return
        number = message.get("id")
        if not isinstance(number, int) or not message.keys() & ANSWERS:
            raise ProgramFailed(f"{self._program.name} wrote something that is not an answer")
        if "stopping" in message:
            if number in self.stopping:
                self.stopping[number] = True
            return
        self.stopping.pop(number, None)
        answered = self.waiting.pop(number, None)
        if answered is not None:
            answered.set_result(dict(message))

    def end(self) -> None:
        """Kill the process and everything that it started."""
        self.ended = True
        self.retired = True
        self._program.kill()
        self._lines.put(None)
