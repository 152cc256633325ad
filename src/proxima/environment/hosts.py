"""The worker processes that run the environments, from the side of the run.

Each worker has many environments and runs one call at a time. Calls wait in the worker's own queue, and the waiting
time counts towards no limit. A call that raises fails only its own episode. If a worker dies, misses a deadline or
sends an invalid reply, the episode whose call it ran fails; its other episodes fail as `collateral`.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from proxima.data import as_field_errors
from proxima.data.episode import ToolCall
from proxima.data.flow import Message
from proxima.environment.host_sandbox import HostSandbox
from proxima.environment.interface import HOST_PROCESS, EnvironmentInterface, EnvironmentSpec
from proxima.environment.protocol import RewardWithParts
from proxima.process.sandbox import CodeServers, Sandbox, SandboxMissing, brought_kind
from proxima.process.worker import START_SECONDS, ForkServer, KeptWorker, Worker, WorkerQueue

CODE_MEMORY_MB = 512  # of code that sets no more


class EnvironmentFailure(Exception):
    """An environment that can't continue.

    Args:
        reason: one line.
        collateral: another episode ended the worker; restarting this one does not count as a retry.

    Attributes: `own`, the seconds that the call took without its waits; None: unknown.
    """

    own: float | None = None

    def __init__(self, reason: str, *, collateral: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.collateral = collateral


def too_slow(seconds: float) -> EnvironmentFailure:
    """The failure of an episode whose environment takes longer than this, `episode.seconds`."""
    return EnvironmentFailure(f"its environment took longer than {seconds:g} s (episode.seconds)")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An environment's answer to a turn.

    Args:
        messages: messages that the model sees; may be empty.
        reward: reward of the turn, in reward units.
        done: the episode is over.
        state: the environment's name for its state from now on; None: unnamed.
        role: who speaks next; None: who has just spoken.
        error: the model's tool call failed.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    state: str | None = None
    role: str | None = None
    error: bool = False


class Hosts:
    """The workers of a run. They start with the first episodes, and may be used from several event loops.

    Args:
        workers: number of processes.
        call_seconds: wall-clock time limit of a call.
        start_seconds: time limit of the import in a new worker, and of its first `reset`.
        memory_mb: MiB that a worker may write beyond its memory at the start; 0: no limit.
        sandbox: see `process.sandbox.usable_kind`: where the workers run.

    Raises: FieldError: see `EnvironmentSpec.inspected`.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        workers: int = 2,
        call_seconds: float = 30.0,
        start_seconds: float = START_SECONDS,
        memory_mb: int = 1024,
        sandbox: str = "none",
    ) -> None:
        self.spec = spec
        self.call_seconds = call_seconds
        self.start_seconds = start_seconds
        self._numbers = count()
        self.log: str | None = None
        options = {"warm_ups": [EnvironmentSpec.__module__], "restricted": False, "memory_mb": memory_mb}
        name = spec.kind or ", ".join(spec.tools)
        load = f"environment {name}: loading it"
        slow = {"inspect": load, "load_environment": load, "open_environment": f"environment {name}: its first `reset`"}
        self._sandbox: Sandbox | None = None
        self.notes: tuple[str, ...] = ()
        if sandbox != "none":
            made = HostSandbox(sandbox, spec, workers * memory_mb)
            self._sandbox = made.sandbox
            self.notes = made.notes
        self._code: CodeServers | None = None
        self._server = ForkServer(HOST_PROCESS, "environment", options, slow, self._sandbox)
        try:
            self.interface = spec.inspected(lambda: self._server.fork(memory_mb=0), start_seconds)
            self.notes += self.interface.notes
            brought = brought_kind(self.interface.settled.get("sandbox", "none"))
            if brought is not None:
                with as_field_errors(SandboxMissing):
                    memory = max(CODE_MEMORY_MB, int(spec.arguments.get("memory_mb", 0)))
                    self._code = brought.code_servers(workers, memory)
        except BaseException:
            self._server.close()
            raise
        self._hosts = [_Host(self) for _ in range(workers)]

    def log_to(self, file: Path | None) -> None:
        """Append the output of environments to a file from now on; None, the default, discards it. Workers in a sandbox
        can't open the file, so their output is always discarded."""
        if file is None or self._sandbox:
            self.log = None
        else:
            self.log = str(file.absolute())

    def start_worker(self) -> Worker:
        """Start a worker that has loaded the environment.

        Raises: EnvironmentFailure.
        """
        try:
            arguments = {**self.spec.arguments, **self.interface.settled}
            load = {**vars(self.spec), "arguments": arguments, "log": self.log}
            if self._code is not None:
                load["served"] = [self.interface.settled["sandbox"], self._code.address]
            return self._server.fork(("load_environment", load), seconds=self.start_seconds)
        except RuntimeError as error:
            raise EnvironmentFailure(f"it can't be loaded: {error}") from error

    async def open(self, row: Mapping[str, Any], seed: int, label: str = "") -> "Instance":
        """Create an environment and reset it.

        Args:
            row: columns by name, including `messages`; JSON values.
            seed: the same for the completions of a prompt.
            label: the episode's name in the log.
        Raises: EnvironmentFailure.
        """
        host = min(self._hosts, key=lambda host: len(host.alive))
        instance = Instance(self.interface, host, next(self._numbers), label)
        await instance.open(row, seed)
        return instance

    def close(self) -> None:
        """Kill the workers, whatever they are doing. May be called twice."""
        self._server.close()
        if self._code is not None:
            self._code.close()
        for host in self._hosts:
            host.queue.close()
        with suppress(OSError):  # a worker creates it before it has anything to write
            if self.log is not None and not os.stat(self.log).st_size:
                os.unlink(self.log)


class Instance:
    """An environment in a worker.

    Args:
        label: the episode's name in the log.

    Attributes: `interface`, with the tools of its row once it is open.
    """

    def __init__(self, interface: EnvironmentInterface, host: "_Host", number: int, label: str) -> None:
        self.interface = interface
        self._host = host
        self._number = number
        self._label = label
        self._epoch: int | None = None  # None: it is not open yet
        self.opening: tuple[Message, ...] | None = None  # messages that replace the row's; None: keep the row's
        self.state: str | None = None  # the environment's name for the state before the first turn
        self.role: str | None = None  # who begins
        self.seconds = 0.0  # time of its calls so far, without the time spent waiting for the worker

    async def open(self, row: Mapping[str, Any], seed: int) -> None:
        """Create the environment and reset it.

        Raises: EnvironmentFailure.
        """
        self._host.alive.add(self._number)
        opened = await self._run("open_environment", row=dict(row), seed=seed)
        self.state = opened["state"]
        self.role = opened.get("role")
        if opened["opening"] is None:
            self.opening = None
        else:
            self.opening = tuple(opened["opening"])
        self.interface = self.interface.with_row(opened)

    async def call(self, calls: Sequence[ToolCall]) -> list[Answer]:
        """Run tool calls and return an answer for each, in order; after one that ended the episode, answers are empty.

        Raises: EnvironmentFailure.
        """
        answers: list[Answer] = []
        for call in calls:
            if answers and answers[-1].done:
                answers.append(Answer(done=True))
                continue
            try:
                arguments = self.interface.arguments_of(call)
            except ValueError as error:
                refusal: Message = {"role": "tool", "name": call.name, "content": f"error: {error}"}
                answers.append(Answer(messages=(refusal,), error=True))
                continue
            answers.append(await self._answer("call_tool", tool=call.name, arguments=arguments))
        return answers

    async def respond(self, text: str) -> Answer:
        """Return the answer to a message that calls no tool.

        Raises: EnvironmentFailure.
        """
        return await self._answer("respond", text=text)

    async def end(self, messages: Sequence[Message] = ()) -> float | Mapping[str, float] | RewardWithParts | None:
        """Return the final reward as the environment gave it, None if it has no such reward, and free the environment.

        Args:
            messages: what was said, for an interface that `reads_messages`.
        Raises: EnvironmentFailure.
        """
        said = {"messages": list(messages)} if self.interface.reads_messages else {}
        ended = await self._run("end", **said)
        self._host.alive.discard(self._number)
        reward: float | Mapping[str, float] | None = ended["reward"]
        if reward is None or "parts" not in ended:
            return reward
        return RewardWithParts(value=reward, parts=ended["parts"])

    def drop(self) -> None:
        """Free the environment without its reward. May be called twice."""
        if self._number in self._host.alive:
            self._host.alive.discard(self._number)
            with suppress(EnvironmentFailure):
                self._host.submit("drop", {"number": self._number}, self._epoch)

    async def _answer(self, job: str, **arguments: Any) -> Answer:
        value = await self._run(job, **arguments)
        return Answer(**{**value, "messages": tuple(value["messages"])})

    async def _run(self, job: str, **arguments: Any) -> dict[str, Any]:
        try:
            call = {"number": self._number, "label": self._label, **arguments}
            future = self._host.submit(job, call, self._epoch)
            value = await asyncio.wrap_future(future)
        except BaseException:
            self.drop()
            raise
        self.seconds += value.pop("seconds")
        self._epoch = value.pop("epoch")
        return value


class _Host:
    """A worker and its queue. `alive` holds the numbers of its environments. An environment's epoch is the number of
    workers that have ended before its own: a call to one of an earlier worker fails.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.alive: set[int] = set()
        self.queue = WorkerQueue(hosts.start_worker)
        self._hosts = hosts
        self._warm: Worker | None = None  # the worker that has opened an environment: later ones open faster

    def submit(self, job: str, arguments: Mapping[str, Any], epoch: int | None = None) -> Future[dict[str, Any]]:
        """Queue a job; its future raises EnvironmentFailure. `epoch`: its environment's; None: it is not open yet."""
        try:
            return self.queue.submit(partial(self._run, job, arguments, epoch))
        except RuntimeError as error:
            raise EnvironmentFailure("the workers of the environments are closed") from error

    def _run(self, job: str, arguments: Mapping[str, Any], epoch: int | None, kept: KeptWorker) -> dict[str, Any]:
        hosts = self._hosts
        opens = job == "open_environment"
        if epoch not in (None, kept.deaths):
            raise EnvironmentFailure(f"another episode ended its worker: {kept.why}", collateral=True)
        arguments = {**arguments, "log": hosts.log}
        cold = opens and kept.worker is not self._warm
        seconds = hosts.start_seconds if cold else hosts.call_seconds
        result = kept.run(job, arguments, seconds, first_seconds=hosts.start_seconds, again=opens)
        value = result.value or {}
        failure = result.error or value.get("failure")
        if failure is not None:
            if hosts.log:
                failure = f"{failure}; see {os.path.basename(hosts.log)}"
            raise EnvironmentFailure(failure)
        if opens:
            self._warm = kept.worker
        return {**value, "epoch": kept.deaths}
