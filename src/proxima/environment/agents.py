"""External agents: a Python function, or a command in any language, that plays an episode against an endpoint."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from proxima.data import FieldError
from proxima.environment.episode_clock import EpisodeClock
from proxima.environment.hosts import EnvironmentFailure
from proxima.environment.job_processes import GRACE_SECONDS, JobFailed, JobProcesses
from proxima.environment.protocol import RewardWithParts
from proxima.process.children import ENDS_WITH_US, kill_group
from proxima.process.exit_status import describe_exit
from proxima.process.program import LONGEST_REASON
from proxima.system.proxies import exempt_this_machine

SCRIPT = Path(__file__).with_name("agent_process.py")
KEPT_BYTES = 1 << 16  # of the end of a command's output


AgentReward = float | Mapping[str, float] | RewardWithParts | None
"""The reward of the episode; that of each role, or player, by its name; none."""


@dataclass(frozen=True, kw_only=True)
class AgentJob:
    """An episode for an agent to play.

    Args:
        row: the columns of the row, including `messages` and `answer`.
        base_url, api_key, model: the settings of an OpenAI client.
        clock: runs while the agent plays; agents that let an episode wait for a place say so by `clock.queued`.
        group, sample: uid of the prompt, and number of the completion in its group.
        seed: the same for the completions of a prompt.
        ask, pay: for what plays in this process: `ask(request)` answers a chat, `pay(turn, reward)` gives a turn a
            reward, see `AgentEpisodes`.
    """

    row: Mapping[str, Any]
    base_url: str
    api_key: str
    model: str = "policy"
    clock: EpisodeClock = field(default_factory=EpisodeClock)
    group: int = 0
    sample: int = 0
    seed: int = 0
    ask: Any = None
    pay: Any = None

    @property
    def settings(self) -> dict[str, Any]:
        """What the agent gets, as JSON values."""
        return {"row": dict(self.row), "base_url": self.base_url, "api_key": self.api_key, "model": self.model}

    def variables(self, base_url: str = "") -> dict[str, str]:
        """The environment variables that the clients of OpenAI and Anthropic read.

        Args:
            base_url: where a sandbox or container reaches the endpoint, for which no proxy is asked; empty: the agent
                runs on this machine.
        """
        url = base_url or self.base_url
        client = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}
        client["ANTHROPIC_BASE_URL"] = url.removesuffix("/v1")  # its client adds it
        client |= {
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }
        return client | exempt_this_machine(always=bool(base_url))


class Agents(Protocol):
    """Plays episodes, many at once."""

    async def play(self, job: AgentJob) -> AgentReward:
        """Play an episode and return the reward that the agent itself gives.

        Raises:
            EnvironmentFailure: the agent failed.
        """

    def close(self) -> None:
        """Kill the processes that are still running. May be called twice, and after the event loop has ended."""


class AgentsInside(Agents):
    """Base of agents that need no endpoint: they play in this process, where `AgentJob.ask` answers."""


class ListeningAgents(Agents):
    """Base of agents that come from outside, by an address of their own, at which the endpoint listens for the whole
    run.

    Attributes: `listening`, the socket, since `listen`.
    """

    listening: socket.socket | None

    def listen(self) -> None:
        """Listen, before weights load; FieldError: it is not possible."""
        raise NotImplementedError

    def begin(self, folder: Path) -> None:
        """Keep what outlives a kill in the folder of the run, which begins or goes on."""
        raise NotImplementedError

    def routes(self) -> Sequence[Any]:
        """Starlette's routes, beside those of the endpoint."""
        raise NotImplementedError


class AgentFailed(EnvironmentFailure):
    """An agent that can't continue.

    Args:
        reason: one line.
        reward: the reward until then; None: unknown.
        unscored: the reward can't be computed, whatever the agent did.
        collateral: see `EnvironmentFailure`.
    """

    def __init__(self, reason: str, reward: AgentReward, unscored: bool = False, *, collateral: bool = False) -> None:
        super().__init__(reason, collateral=collateral)
        self.reward = reward
        self.unscored = unscored


class Runner(Protocol):
    """Starts the programs of agents."""

    def running(self, job: AgentJob) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
        """The program of an episode, with pipes to its standard streams. At the end it is killed with all that it has
        started, and its exit code is known.

        Raises:
            FieldError: it can't be started.
        """

    def describe(self, code: int, errors: str) -> str:
        """Describe how a program ended, given what it wrote to its standard error."""

    def close(self) -> None:
        """Kill the programs that are still running."""


class ProgramGroups:
    """Programs that are running on this machine, each with all that it has started."""

    def __init__(self) -> None:
        self._running: set[asyncio.subprocess.Process] = set()

    @asynccontextmanager
    async def killed_at_end(self, process: asyncio.subprocess.Process) -> AsyncIterator[None]:
        """Kill a program at the end of the block, and wait until it has ended."""
        self._running.add(process)
        try:
            yield
        finally:
            kill_group(process.pid)
            self._running.discard(process)
            close_pipes(process)
            await process.wait()

    def kill(self) -> None:
        """Kill those that are running."""
        for process in self._running:
            kill_group(process.pid)


class LocalRunner:
    """Starts the programs beside the run, with its rights and environment."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = tuple(command)
        self._programs = ProgramGroups()

    @asynccontextmanager
    async def running(self, job: AgentJob) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await start_program(self.command, os.environ | job.variables(), **ENDS_WITH_US)
        async with self._programs.killed_at_end(process):
            yield process

    def describe(self, code: int, errors: str) -> str:
        last, *_ = errors.strip().splitlines()[-1:] or [""]
        return describe_exit(code, last[:200])

    def close(self) -> None:
        self._programs.kill()


def close_pipes(process: asyncio.subprocess.Process) -> None:
    """Close our ends of the pipes of a process that was killed. asyncio's `wait` waits for them, too, and they may hold
    what nobody reads, or be held open by what the process has left behind.

    Closing its transport would also ask for the exit code; where that is faster than the thread of asyncio that waits
    for the process, nobody would learn it.
    """
    transport = process._transport  # type: ignore[attr-defined]  # there is no public way
    for descriptor in range(3):
        pipe = transport.get_pipe_transport(descriptor)
        if pipe is not None:
            pipe.close()


async def start_program(
    command: Sequence[str], environment: Mapping[str, str], **options: Any
) -> asyncio.subprocess.Process:
    """Start the program of an agent; FieldError if it can't be started."""
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, **options
        )
    except OSError as error:
        bound = f"can't be started: {error.strerror}"
        raise FieldError("task.environment.command", list(command), bound) from None


class CommandAgents:
    """Agents that run one program per episode.

    Args:
        runner: starts the programs.
        most: maximum number of programs at once.
    """

    def __init__(self, runner: Runner, most: int) -> None:
        self._runner = runner
        self._places = asyncio.Semaphore(most)

    async def play(self, job: AgentJob) -> AgentReward:
        async with job.clock.place_in(self._places), AsyncExitStack() as program:
            with job.clock.queued():  # a program that has not started spends no time of its own
                process = await program.enter_async_context(self._runner.running(job))
            out, errors, cut = await read_to_end(process, json.dumps(dict(job.row)).encode())
        assert process.returncode is not None
        if process.returncode:
            how = self._runner.describe(process.returncode, errors.decode(errors="replace"))
            if cut:
                how += f" ({cut:,} bytes of its output are cut)"
            raise EnvironmentFailure(f"the agent ended with {how}")
        lines = out.decode(errors="replace").strip().splitlines()
        if len(out) == KEPT_BYTES and len(lines) < 2:  # what is left of a number may be another one
            raise EnvironmentFailure(f"the last line of the agent's output has more than {KEPT_BYTES:,} bytes")
        return _reward(lines[-1]) if lines else None

    def close(self) -> None:
        self._runner.close()


async def read_to_end(process: asyncio.subprocess.Process, given: bytes) -> tuple[bytes, bytes, int]:
    """Write to a program's standard input; return the ends of its output and its errors, and the number of bytes before
    them, once both have ended."""
    assert process.stdin and process.stdout and process.stderr
    (out, cut), (errors, cut_errors), _ = await asyncio.gather(
        _end_of(process.stdout), _end_of(process.stderr), _feed(process.stdin, given)
    )
    return out, errors, cut + cut_errors


class ProcessAgents:
    """Agents in processes that each play many episodes, see `JobProcesses`, which has the arguments."""

    def __init__(
        self, command: Sequence[str], workers: int, name: str = "the agent's process", grace: float = GRACE_SECONDS
    ) -> None:
        self._processes = JobProcesses(command, workers, name, grace)

    async def play(self, job: AgentJob) -> AgentReward:
        try:
            answer = await self._processes.process().ask(job.settings, job.clock)
        except JobFailed as failure:
            raise AgentFailed(failure.reason, None) from None
        reward = _reward_in(answer)
        if "error" in answer:
            error = " ".join(str(answer["error"]).split())[:LONGEST_REASON]
            raise AgentFailed(f"the agent failed: {error}", reward, bool(answer.get("unscored")))
        return reward

    def close(self) -> None:
        self._processes.close()


def _reward_in(answer: Mapping[str, Any]) -> AgentReward:
    """The reward in an answer of a process.

    Raises:
        AgentFailed: it is none.
    """
    given = answer.get("reward")
    parts = answer.get("parts")
    try:
        if given is None:
            return None
        reward = _numbers(given) if isinstance(given, Mapping) else _number(given)
        if parts is None:
            return reward
        return RewardWithParts(value=reward, parts=_numbers(parts))
    except (TypeError, AttributeError, OverflowError):
        raise AgentFailed(f"its answer has no reward: {_short(given)}, with parts {_short(parts)}", None) from None


def _number(value: Any) -> float:
    """TypeError, OverflowError: it is none."""
    if not isinstance(value, int | float):
        raise TypeError(value)
    return float(value)


def _numbers(values: Any) -> dict[str, float]:
    """TypeError, AttributeError, OverflowError: they are none."""
    return {str(name): _number(value) for name, value in values.items()}


def _short(value: Any) -> str:
    return json.dumps(value)[:100]


def _reward(line: str) -> AgentReward:
    """The reward in the last line of a program's output: a number, or a JSON object of numbers."""
    with suppress(ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        if line.startswith("{"):
            return {str(name): float(value) for name, value in json.loads(line).items()}
        return float(line)
    return None


async def _end_of(stream: asyncio.StreamReader) -> tuple[bytes, int]:
    """Read a stream to its end; return its last KEPT_BYTES, and the number of bytes before them."""
    kept = b""
    cut = 0
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
