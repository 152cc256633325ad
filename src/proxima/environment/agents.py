"""Agents from outside: a Python function, or a command in any language, that plays an episode against an address."""

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from proxima.data import FieldError, require
from proxima.environment.hosts import EnvironmentFailure

SCRIPT = Path(__file__).with_name("agent_process.py")
LINE_BYTES = 1 << 20  # of an agent's answer


@dataclass(frozen=True, kw_only=True)
class Job:
    """An episode that an agent is to play.

    Args:
        row: the columns of the row, `messages` and `answer` among them.
        base_url, api_key, model: what an OpenAI client is given.
    """

    row: Mapping[str, Any]
    base_url: str
    api_key: str
    model: str = "policy"


class Agents(Protocol):
    """Plays episodes, many at once."""

    async def play(self, job: Job) -> float | None:
        """The reward that the agent itself gives, if it gives one.

        Raises:
            EnvironmentFailure: it failed.
        """

    async def close(self) -> None:
        """End what still runs. May be called twice."""


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """What a recipe says of an agent: `run` or `command`, not both.

    Args:
        run: `module:function`, which gets those of `row`, `base_url`, `api_key` and `model` that it names, may be
            `async`, and returns a reward or None.
        command: a program and its arguments; `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL` are set, the row is
            JSON on its standard input. Its last line of output may be the reward, a number.
        workers: processes that run the function, or programs that run at once.
    """

    run: str = ""
    command: tuple[str, ...] = ()
    workers: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", tuple(self.command))
        one = bool(self.run) != bool(self.command)
        require(one, "run", self.run or None, "must be given, or `command`, and not both")
        require(not self.run or ":" in self.run, "run", self.run, "must be module:function")
        require(self.workers >= 0, "workers", self.workers, "must be >= 0", remedy="0: 1 process, or 16 programs")
        if self.run:
            import importlib.util

            name = self.run.partition(":")[0]
            try:
                known = importlib.util.find_spec(name) is not None
            except (ImportError, ValueError):
                known = False
            remedy = "run in its folder, or install it"
            require(known, "run", self.run, f"names the module {name}, which can't be found", remedy=remedy)

    def build(self) -> Agents:
        """The agents."""
        return FunctionAgents(self.run, self.workers or 1) if self.run else CommandAgents(self.command, self.workers or 16)


class CommandAgents:
    """A process for each episode.

    Args:
        command: see `AgentSpec`.
        most: processes at once.
    """

    def __init__(self, command: Sequence[str], most: int) -> None:
        self.command, self._places = tuple(command), asyncio.Semaphore(most)
        self._running: set[asyncio.subprocess.Process] = set()

    async def play(self, job: Job) -> float | None:
        own = {"OPENAI_BASE_URL": job.base_url, "OPENAI_API_KEY": job.api_key, "OPENAI_MODEL": job.model}
        async with self._places:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=os.environ | own,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            except OSError as error:
                bound = f"can't be started: {error.strerror}"
                raise FieldError("task.environment.command", list(self.command), bound) from None
            self._running.add(process)
            try:
                out, errors = await process.communicate(json.dumps(dict(job.row)).encode())
            finally:
                _kill(process)
                self._running.discard(process)
        if process.returncode:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise EnvironmentFailure(f"the agent ended with exit code {process.returncode}: {' '.join(last)[:200]}")
        lines = out.decode(errors="replace").strip().splitlines()
        with suppress(ValueError):
            return float(lines[-1]) if lines else None
        return None

    async def close(self) -> None:
        for process in self._running:
            _kill(process)


class FunctionAgents:
    """Processes that each play many episodes by one function. One that ends fails all episodes that it plays; these
    may begin again in the process that takes its place.

    Args:
        reference: see `AgentSpec.run`.
        workers: processes.
    """

    def __init__(self, reference: str, workers: int) -> None:
        self._workers = [_Worker(reference) for _ in range(workers)]

    async def play(self, job: Job) -> float | None:
        return await min(self._workers, key=lambda worker: len(worker.waiting)).play(job)

    async def close(self) -> None:
        for worker in self._workers:
            worker.end()


@dataclass(eq=False)
class _Worker:
    reference: str
    waiting: dict[int, "asyncio.Future[dict[str, Any]]"] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    numbers: Any = field(default_factory=count)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reader: "asyncio.Task[None] | None" = None

    async def play(self, job: Job) -> float | None:
        number, future = next(self.numbers), asyncio.get_running_loop().create_future()
        self.waiting[number] = future
        try:
            process = await self._started()
            assert process.stdin is not None
            message = {"id": number, "row": dict(job.row), "base_url": job.base_url}
            message |= {"api_key": job.api_key, "model": job.model}
            process.stdin.write(json.dumps(message).encode() + b"\n")
            with suppress(ConnectionError):  # `_read` sees the end
                await process.stdin.drain()
            try:
                answer = await future
            except asyncio.CancelledError:  # an episode that takes too long, or the end of the run
                self.end()
                raise
        finally:
            self.waiting.pop(number, None)
        if "error" in answer:
            raise EnvironmentFailure(f"the agent failed: {answer['error']}")
        reward: float | None = answer["reward"]
        return reward

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self.process is None:
                self.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, str(SCRIPT), self.reference),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    limit=LINE_BYTES,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
                self._reader = asyncio.create_task(self._read(self.process))
            return self.process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None and process.stderr is not None
        last = [""]
        errors = asyncio.create_task(_last_line(process.stderr, last))
        try:
            async for line in process.stdout:
                answer = json.loads(line)
                if (future := self.waiting.get(answer["id"])) is not None and not future.done():
                    future.set_result(answer)
        except ValueError:
            last.append("it wrote what is no answer")
        finally:
            _kill(process)
            with suppress(asyncio.CancelledError):
                await asyncio.wait([errors], timeout=1)
            if self.process is process:
                self.process = None
            waiting = [future for future in self.waiting.values() if not future.done()]
            for future in waiting:
                failure = EnvironmentFailure(f"the agent's process ended: {last[-1]}", collateral=len(waiting) > 1)
                future.set_exception(failure)

    def end(self) -> None:
        """Kill the process; the next episode has another."""
        if self.process is not None:
            _kill(self.process)


async def _last_line(stream: asyncio.StreamReader, last: list[str]) -> None:
    while part := await stream.read(1 << 16):
        lines = [line for line in part.decode(errors="replace").splitlines() if line.strip()]
        last[:] = [line.strip()[:200] for line in lines[-1:]] or last


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Linux kills the process when this one ends, however it ends."""
    _libc.prctl(1, signal.SIGKILL)


def _kill(process: asyncio.subprocess.Process) -> None:
    """The process and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
