"""External agents: a Python function, or a command in any language, that plays an episode against an endpoint."""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from proxima.data import FieldError, require
from proxima.environment.hosts import EnvironmentFailure
from proxima.process.children import ENDS_WITH_US, describe_exit, kill_group
from proxima.process.program import Program, ProgramFailed
from proxima.system.machine import SERVER_REMEDY, missing_for_server
from proxima.system.user_modules import user_module_file

AGENT = "agent"  # the kind of environment that is an external agent
SCRIPT = Path(__file__).with_name("agent_process.py")
KEPT_BYTES = 1 << 16  # of the end of a command's output


@dataclass(frozen=True, kw_only=True)
class AgentJob:
    """An episode for an agent to play.

    Args:
        row: the columns of the row, including `messages` and `answer`.
        base_url, api_key, model: the settings of an OpenAI client.
    """

    row: Mapping[str, Any]
    base_url: str
    api_key: str
    model: str = "policy"


class Agents(Protocol):
    """Plays episodes, many at once."""

    async def play(self, job: AgentJob) -> float | None:
        """Play an episode and return the reward that the agent itself gives, None if it gives no reward.

        Raises:
            EnvironmentFailure: the agent failed.
        """

    def close(self) -> None:
        """Kill the processes that are still running. May be called twice, and after the event loop has ended."""


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """An agent as specified in a recipe: `run` or `command`, not both.

    Args:
        run: `module:function`. The function receives those of `row`, `base_url`, `api_key` and `model` that are among
            its parameters, may be `async`, and returns a reward or None.
        command: a program and its arguments. `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL` are set; the row is
            passed as JSON on standard input. The last line of output may be the reward, a number; of longer output,
            the last 64 KiB are kept.
        workers: number of processes that run the function, or of programs that run at once.
    """

    run: str = ""
    command: tuple[str, ...] = ()
    workers: int = 0

    def __post_init__(self) -> None:
        exactly_one = bool(self.run) != bool(self.command)
        require(exactly_one, "run", self.run or None, "must be given, or `command`, and not both")
        require(not self.run or ":" in self.run, "run", self.run, "must be module:function")
        require(self.workers >= 0, "workers", self.workers, "must be >= 0", remedy="0: 1 process, or 16 programs")
        missing = missing_for_server()
        field, value = ("run", self.run) if self.run else ("command", self.command)
        require(not missing, field, value, f"is served by {missing}, not installed here", remedy=SERVER_REMEDY)
        if self.run:
            name = self.run.partition(":")[0]
            importable = user_module_file(name) is not None  # not imported: only the worker needs its packages
            remedy = "run in its folder, or install it"
            require(importable, "run", self.run, f"names the module {name}, which can't be found", remedy=remedy)

    def build(self) -> Agents:
        """Build the agents."""
        return (
            FunctionAgents(self.run, self.workers or 1) if self.run else CommandAgents(self.command, self.workers or 16)
        )


class CommandAgents:
    """Agents that run one process per episode.

    Args:
        command: see `AgentSpec`.
        most: maximum number of processes at once.
    """

    def __init__(self, command: Sequence[str], most: int) -> None:
        self.command, self._places = tuple(command), asyncio.Semaphore(most)
        self._running: set[asyncio.subprocess.Process] = set()

    async def play(self, job: AgentJob) -> float | None:
        variables = {"OPENAI_BASE_URL": job.base_url, "OPENAI_API_KEY": job.api_key, "OPENAI_MODEL": job.model}
        async with self._places:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=os.environ | variables,
                    **ENDS_WITH_US,
                )
            except OSError as error:
                bound = f"can't be started: {error.strerror}"
                raise FieldError("task.environment.command", list(self.command), bound) from None
            self._running.add(process)
            assert process.stdin and process.stdout and process.stderr
            row = json.dumps(dict(job.row)).encode()
            try:
                (out, cut), (errors, cut_errors), _ = await asyncio.gather(
                    _end_of(process.stdout), _end_of(process.stderr), _feed(process.stdin, row)
                )
            finally:
                kill_group(process.pid)
                self._running.discard(process)
                await process.wait()
        if process.returncode:
            last, *_ = errors.decode(errors="replace").strip().splitlines()[-1:] or [""]
            how = describe_exit(process.returncode, last[:200])
            how += f" ({cut + cut_errors:,} bytes of its output are cut)" if cut or cut_errors else ""
            raise EnvironmentFailure(f"the agent ended with {how}")
        lines = out.decode(errors="replace").strip().splitlines()
        if cut and len(lines) < 2:  # what is left of a number may be another one
            raise EnvironmentFailure(f"the last line of the agent's output has more than {KEPT_BYTES:,} bytes")
        with suppress(ValueError):
            return float(lines[-1]) if lines else None
        return None

    def close(self) -> None:
        for process in self._running:
            kill_group(process.pid)


class FunctionAgents:
    """Processes that each play many episodes with one function. If a process ends, all its episodes fail; they may be
    restarted in the process that replaces it.

    Args:
        reference: see `AgentSpec.run`.
        workers: number of processes.
    """

    def __init__(self, reference: str, workers: int) -> None:
        self.reference = reference
        self._workers: list[_AgentProcess | None] = [None] * workers

    async def play(self, job: AgentJob) -> float | None:
        busy = [0 if worker is None else len(worker.waiting) for worker in self._workers]
        place = busy.index(min(busy))
        worker = self._workers[place]
        if worker is None or worker.ended:
            worker = self._workers[place] = _AgentProcess(self.reference)
        return await worker.play(job)

    def close(self) -> None:
        for worker in self._workers:
            if worker is not None:
                worker.end()


class _AgentProcess:
    """A single process, from start to end, for one event loop at a time.

    `waiting` holds the episodes in progress, by number.
    """

    def __init__(self, reference: str) -> None:
        self.waiting: dict[int, Future[dict[str, Any]]] = {}
        self.ended = False
        self._numbers = count()
        self._giving = threading.Lock()  # an episode given after the end would wait for an answer that nobody reads
        self._program = Program((sys.executable, str(SCRIPT), reference), name="the agent's process")
        threading.Thread(target=self._read, daemon=True).start()

    async def play(self, job: AgentJob) -> float | None:
        number, answered = next(self._numbers), Future[dict[str, Any]]()
        with self._giving:
            if self.ended:
                raise EnvironmentFailure("another episode ended the agent's process", collateral=True)
            self.waiting[number] = answered
        try:
            self._program.write({"id": number, **vars(job), "row": dict(job.row)})
            answer = await asyncio.shield(asyncio.wrap_future(answered))
        except asyncio.CancelledError:  # an episode that takes too long, or the end of the run
            self.end()
            raise
        finally:
            self.waiting.pop(number, None)
        if "error" in answer:
            raise EnvironmentFailure(f"the agent failed: {answer['error']}")
        reward: float | None = answer["reward"]
        return reward

    def _read(self) -> None:
        """Forward answers until the process ends; then fail all episodes still in progress."""
        try:
            while True:
                answer = self._program.read()
                if not isinstance(answer.get("id"), int) or not answer.keys() & {"reward", "error"}:
                    raise ProgramFailed(f"{self._program.name} wrote something that is not an answer")
                if (answered := self.waiting.pop(answer["id"], None)) is not None:
                    answered.set_result(answer)
        except ProgramFailed as error:
            with self._giving:
                self.end()
                unanswered, self.waiting = self.waiting, {}
            for answered in unanswered.values():
                answered.set_exception(EnvironmentFailure(str(error), collateral=len(unanswered) > 1))

    def end(self) -> None:
        """Kill the process and everything that it started."""
        self.ended = True
        self._program.kill()


async def _end_of(stream: asyncio.StreamReader) -> tuple[bytes, int]:
    """Read a stream to its end; return its last KEPT_BYTES, and the number of bytes before them."""
    kept, cut = b"", 0
    while part := await stream.read(KEPT_BYTES):
        kept += part
        cut += max(0, len(kept) - KEPT_BYTES)
        kept = kept[-KEPT_BYTES:]
    return kept, cut


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Write all of `data` and close the stream; a process need not read it."""
    with suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
    stream.close()
