"""Environments that wait for other programs, in the run's own process, many at once.

A kind by name whose class has `concurrent = True` is played here instead of in a worker: its `reset`, `call_tool`,
`respond` and `get_reward` are coroutine functions that never block, it limits its own calls, and `close()` frees an
episode's environment. `workers` says how many are open at once; waiting for such a place counts toward no limit.
`shared` is a dict that all environments of a host have, of things with `close()`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

from proxima.data import UserError, require
from proxima.environment.host_process import (
    BadAnswer,
    answer_of,
    opening_of,
    reset_arguments,
    reward_number,
    tool_answer,
    tool_error,
)
from proxima.environment.hosts import EnvironmentFailure, Hosts, Instance
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
        starts_per_second: see `EpisodeSettings.starts_per_second`.

    Raises: FieldError: it can't be created.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, spec: EnvironmentSpec, starts_per_second: float | None = None) -> None:
        assert spec.kind is not None
        self.spec = spec
        self._starts = StartRate(starts_per_second)
        bound = f"can't be given beside the environment {spec.kind!r}, which has its own"
        require(not spec.tools, "tools", list(spec.tools), bound)
        self.interface = EnvironmentInterface.of(read_interface(**vars(spec)))
        self.places = getattr(self.make(), "workers", PLACES)
        self.shared: dict[str, Any] = {}
        self._free: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self._open: set[ConcurrentInstance] = set()

    def make(self) -> Any:
        """Create an environment."""
        kind = str(self.spec.kind)
        return make_environment(kind, load_class(kind), self.spec.arguments)

    def log_to(self, file: Path | None) -> None:
        """Do nothing: these environments print nothing."""

    async def open(self, row: Mapping[str, Any], seed: int, label: str = "") -> "ConcurrentInstance":
        """As `hosts.Hosts.open`."""
        free = self._free.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.places))
        await free.acquire()
        instance = ConcurrentInstance(self, free)
        self._open.add(instance)
        try:
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
        for instance in list(self._open):
            instance.drop()
        for each in self.shared.values():
            each.close()
        self.shared.clear()


AnyHosts = Hosts | ConcurrentHosts


class ConcurrentInstance(Instance):
    """An environment of `ConcurrentHosts`."""

    def __init__(self, hosts: ConcurrentHosts, free: asyncio.Semaphore) -> None:
        super().__init__(hosts.interface, SimpleNamespace(alive=set()), 0, "")  # type: ignore[arg-type]
        self._hosts, self._free = hosts, free
        self._environment: Any = None

    def drop(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()
        self._hosts.ended(self, self._free)

    async def _run(self, job: str, **arguments: Any) -> dict[str, Any]:
        began = monotonic()
        jobs: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "open_environment": self._open_environment,
            "call_tool": self._call_tool,
            "respond": self._respond,
            "end": self._end,
        }
        try:
            value = await jobs[job](**arguments)
        except (BadAnswer, EnvironmentFailure, UserError) as error:
            self.drop()
            raise EnvironmentFailure(str(error)) from error
        except Exception as error:
            self.drop()
            raise EnvironmentFailure(f"{type(error).__name__}: {error}") from error
        except BaseException:
            self.drop()
            raise
        self.seconds += monotonic() - began
        return value

    async def _open_environment(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        environment = self._environment = self._hosts.make()
        environment.shared = self._hosts.shared
        result = await environment.reset(**reset_arguments(environment, row, seed))
        return opening_of(result, row)

    async def _call_tool(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        environment = self._environment
        try:
            result = await environment.call_tool(tool, arguments)
        except Exception as error:
            return tool_error(environment, tool, error)
        return tool_answer(environment, tool, result)

    async def _respond(self, text: str) -> dict[str, Any]:
        environment = self._environment
        return answer_of(environment, await environment.respond(text), "respond", {"role": "user"})

    async def _end(self) -> dict[str, Any]:
        get_reward = member(self._environment, "get_reward")
        reward = None if get_reward is None else reward_number(await get_reward(), "get_reward")
        self.drop()
        return {"reward": reward}
