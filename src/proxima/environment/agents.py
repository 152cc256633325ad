"""Agents from outside: a Python function, or a command in any language, that plays an episode against an address."""

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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

    def close(self) -> None:
        """End what still runs. May be called twice, and after the event loop has ended."""


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
        return (
            FunctionAgents(self.run, self.workers or 1) if self.run else CommandAgents(self.command, self.workers or 16)
        )


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
            said = f": {last[0][:200]}" if last else ""
            raise EnvironmentFailure(f"the agent ended with exit code {process.returncode}{said}")
        lines = out.decode(errors="replace").strip().splitlines()
        with suppress(ValueError):
            return float(lines[-1]) if lines else None
        return None

    def close(self) -> None:
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
        self.reference = reference
        self._workers: list[_Worker | None] = [None] * workers

    async def play(self, job: Job) -> float | None:
        busy = [0 if worker is None else len(worker.waiting) for worker in self._workers]
        place = busy.index(min(busy))
        worker = self._workers[place]
        if worker is None or worker.ended:
            worker = self._workers[place] = _Worker(self.reference)
        return await worker.play(job)

    def close(self) -> None:
        for worker in self._workers:
            if worker is not None:
                worker.end()


class _Worker:
    """One process, from its start to its end.

    `waiting` are the episodes that it plays, or is to play once it has started.
    """

    def __init__(self, reference: str) -> None:
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.ended = False
        self._numbers = count()
        self._process: asyncio.subprocess.Process | None = None
        self._started = asyncio.create_task(self._start(reference))

    async def play(self, job: Job) -> float | None:
        number, answered = next(self._numbers), asyncio.get_running_loop().create_future()
        self.waiting[number] = answered
        message = {"id": number, "row": dict(job.row), "base_url": job.base_url}
        message |= {"api_key": job.api_key, "model": job.model}
        try:
            process = await asyncio.shield(self._started)
            assert process.stdin is not None
            process.stdin.write(json.dumps(message).encode() + b"\n")
            answer = await answered
        except asyncio.CancelledError:  # an episode that takes too long, or the end of the run
            self.end()
            raise
        finally:
            self.waiting.pop(number, None)
        if "error" in answer:
            raise EnvironmentFailure(f"the agent failed: {answer['error']}")
        reward: float | None = answer["reward"]
        return reward

    async def _start(self, reference: str) -> asyncio.subprocess.Process:
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(SCRIPT), reference),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._reader = asyncio.create_task(self._read(process))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand on answers until the process ends; then all that it played has failed."""
        assert process.stdout is not None and process.stderr is not None
        last = [""]
        errors = asyncio.create_task(_last_line(process.stderr, last))
        reason = ""
        try:
            async for line in process.stdout:
                answer = json.loads(line)
                if (answered := self.waiting.get(answer["id"])) is not None and not answered.done():
                    answered.set_result(answer)
            await asyncio.wait([errors, ended := asyncio.create_task(process.wait())], timeout=1)
            reason = f"ended with exit code {process.returncode}" if ended.done() else "closed its output"
        except ValueError:
            reason = "wrote what is no answer"
        finally:
            self.end()
            failed = [answered for answered in self.waiting.values() if not answered.done()]
            what = f"the agent's process {reason or 'ended'}{': ' if last[0] else ''}{last[0]}"
            for answered in failed:
                answered.set_exception(EnvironmentFailure(what, collateral=len(failed) > 1))

    def end(self) -> None:
        """Kill the process."""
        self.ended = True
        if self._process is not None:
            _kill(self._process)


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
    with suppress(RuntimeError):  # the event loop has ended
        process._transport.close()  # type: ignore[attr-defined]  # its pipes: else they warn when they are collected
