"""Environments that wait for other programs, in the run's own process, many at once.

A kind by name whose class has `concurrent = True` is played here instead of in a worker. Its `reset`, `call_tool`,
`respond` and `get_reward` are coroutine functions that never block, and it limits its own calls. It has

    close()                   frees an episode's environment
    places                    how many are open at once; waiting for such a place counts toward no limit
    starts_program = False    opening one starts no program, so that many may open at once
    shared                    set by the host: a dict that all its environments have, of things with `close()`
    clock                     set by the host: the clock of the call; what waits says so by `clock.queued`

A class may also have what a run asks an `agent_kinds.AgentKind`: `check`, `inputs` and `rows`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from proxima.data import UserError, require, within
from proxima.environment.episode_clock import EpisodeClock
from proxima.environment.host_process import (
    BadAnswer,
    answer_of,
    opening_of,
    reset_arguments,
    reward_at_end,
    tool_answer,
    tool_error,
    tools_of_row,
)
from proxima.environment.hosts import EnvironmentFailure, Hosts, Instance, too_slow
from proxima.environment.interface import (
    EnvironmentInterface,
    EnvironmentSpec,
    load_class,
    make_environment,
    member,
    read_interface,
)
from proxima.environment.start_rate import StartRate

PLACES = 16  # where the kind says nothing


class ConcurrentHosts:
    """As `hosts.Hosts`, for one kind.

    Args:
        starts_per_second, seconds: see `EpisodeSettings`.

    Raises: FieldError: it can't be created.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self, spec: EnvironmentSpec, starts_per_second: float | None = None, seconds: float = math.inf
    ) -> None:
        assert spec.kind is not None
        self.spec = spec
        self.seconds = seconds
        self._starts = StartRate(starts_per_second)
        bound = f"can't be given beside the environment {spec.kind!r}, which has its own"
        require(not spec.tools, "tools", list(spec.tools), bound)
        self.interface = EnvironmentInterface.of(read_interface(**vars(spec)))
        made = self.make()
        self.places = getattr(made, "places", PLACES)
        self._paced = getattr(made, "starts_program", True)
        if hasattr(made, "check"):
            with within("environment"):
                made.check()
        self.shared: dict[str, Any] = {}
        self._free: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self._open: set[ConcurrentInstance] = set()
        self._closed = False

    def make(self) -> Any:
        """Create an environment."""
        kind = str(self.spec.kind)
        return make_environment(kind, load_class(kind), self.spec.arguments)

    def log_to(self, file: Path | None) -> None:
        """Do nothing: these environments print nothing."""

    async def open(self, row: Mapping[str, Any], seed: int, label: str = "") -> "ConcurrentInstance":
        """As `hosts.Hosts.open`."""
        if self._closed:
            raise EnvironmentFailure("the environments are closed")
        free = self._free.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.places))
        await free.acquire()
        instance = ConcurrentInstance(self, free)
        self._open.add(instance)
        try:
            if self._paced:
                await self._starts.turn()
        except BaseException:
            instance.drop()
            raise
        await instance.open(row, seed)
        return instance

    def ended(self, instance: "ConcurrentInstance", free: asyncio.Semaphore) -> None:
        """Give the place of an environment to another."""
        if instance in self._open:
            self._open.discard(instance)
            with suppress(RuntimeError):  # the event loop of a trial has ended
                free.release()

    def close(self) -> None:
        """Free what is open, and what is shared. May be called twice."""
        self._closed = True
        for instance in list(self._open):
            instance.drop()
        for each in self.shared.values():
            each.close()
        self.shared.clear()


AnyHosts = Hosts | ConcurrentHosts


class ConcurrentInstance(Instance):
    """An environment of `ConcurrentHosts`."""

    def __init__(self, hosts: ConcurrentHosts, free: asyncio.Semaphore) -> None:
        super().__init__(hosts.interface, SimpleNamespace(alive=set()), 0, "")  # type: ignore[arg-type]  # of a host, only `alive` is used
        self._hosts = hosts
        self._free = free
        self._environment: Any = None

    def drop(self) -> None:
        environment = self._environment
        self._environment = None
        try:
            if environment is not None:
                environment.close()
        finally:
            self._hosts.ended(self, self._free)

    async def _run(self, job: str, **arguments: Any) -> dict[str, Any]:
        clock = EpisodeClock(self._hosts.seconds - self.seconds)
        self._clock = clock
        try:
            return await self._run_by(clock, job, **arguments)
        except EnvironmentFailure as failure:
            failure.own = clock.seconds()["own"]
            raise

    async def _run_by(self, clock: EpisodeClock, job: str, **arguments: Any) -> dict[str, Any]:
        jobs: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "open_environment": self._open_environment,
            "call_tool": self._call_tool,
            "respond": self._respond,
            "end": self._end,
        }
        try:
            value = await clock.within(jobs[job](**arguments))
        except TimeoutError as error:
            self.drop()
            if clock.late:
                raise too_slow(self._hosts.seconds) from error
            raise EnvironmentFailure(f"TimeoutError: {error}") from error
        except EnvironmentFailure:
            self.drop()
            raise
        except (BadAnswer, UserError) as error:
            self.drop()
            raise EnvironmentFailure(str(error)) from error
        except Exception as error:
            self.drop()
            raise EnvironmentFailure(f"{type(error).__name__}: {error}") from error
        except BaseException:
            self.drop()
            raise
        finally:
            self.seconds += clock.seconds()["own"]
        return value

    def _current(self) -> Any:
        """The environment, with the clock of the call."""
        self._environment.clock = self._clock
        return self._environment

    async def _open_environment(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        environment = self._hosts.make()
        self._environment = environment
        environment.shared = self._hosts.shared
        environment.clock = self._clock
        result = await environment.reset(**reset_arguments(environment, row, seed))
        return {**opening_of(result, row), "tools": tools_of_row(str(self._hosts.spec.kind), environment)}

    async def _call_tool(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        environment = self._current()
        try:
            result = await environment.call_tool(tool, arguments)
        except Exception as error:
            return tool_error(environment, tool, error)
        return tool_answer(environment, tool, result)

    async def _respond(self, text: str) -> dict[str, Any]:
        environment = self._current()
        return answer_of(environment, await environment.respond(text), "respond", {"role": "user"})

    async def _end(self, **said: Any) -> dict[str, Any]:
        get_reward = member(self._current(), "get_reward")
        given = dict[str, Any](reward=None)
        if get_reward is not None:
            given = reward_at_end(await get_reward(**said), "get_reward", self.interface.roles)
        self.drop()
        return given
