"""Containers of tasks in Harbor's format, and agents that play there; the task's tests give the reward."""

import asyncio
import io
import json
import math
import os
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.data import FieldError, as_field_errors, within
from proxima.environment.agent_kinds import AgentSandbox, AgentSpec
from proxima.environment.agents import AgentFailed, AgentJob, Agents, read_to_end, start_program
from proxima.environment.hosts import EnvironmentFailure
from proxima_worlds.boxed_agents import ADDRESS, ended, forwarded
from proxima_worlds.containers import PORT, RELAY, ContainerFailed, Containers, Place, engine_program, last_lines
from proxima_worlds.harbor_tasks import HarborTask, read_task

REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")  # the first that the tests have written
TIMED_OUT = 124  # exit code of the relay
LARGEST = 1 << 20  # bytes of a reward file
SHORT_SECONDS = 60  # of commands that prepare the tests
NO_VARIABLES: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class HarborBox(AgentSandbox):
    """The container of the row's task, whose tests give the reward."""

    def agents(self, spec: AgentSpec) -> Agents:
        return HarborAgents(spec)


class HarborAgents:
    """Agents that play Harbor tasks, one container an episode.

    Args:
        spec: of the agent.
    """

    def __init__(self, spec: AgentSpec) -> None:
        self.command = tuple(spec.command)
        self._places = asyncio.Semaphore(spec.workers or 16)
        self._containers: dict[str, Containers] = {}  # by engine

    async def play(self, job: AgentJob) -> float | None:
        task, containers = task_of(job.row, self._containers)
        async with job.clock.place_in(self._places), running_task(containers, task, job) as container:
            code, errors = await container.run(
                self.command, task.agent_seconds, user=task.agent_user, given=json.dumps(dict(job.row)),
                variables=job.variables(ADDRESS) | task.variables,
            )  # fmt: skip
            failure = ""
            if code not in (0, TIMED_OUT):
                failure = f"the agent ended with exit code {code}: {last_lines(errors)}"
            try:
                reward = await container.reward()
            except EnvironmentFailure as error:  # no limit of the episode excuses it
                raise AgentFailed(failure or str(error), None, unscored=True) from None
            if failure:  # what it did counts if a limit ended it
                raise AgentFailed(failure, reward)
            return reward

    def close(self) -> None:
        for containers in self._containers.values():
            containers.close()


def task_of(row: Mapping[str, Any], shared: dict[str, Containers]) -> tuple[HarborTask, Containers]:
    """The task of a row, and the containers of its engine, which are shared by the engine's name.

    Raises:
        FieldError: it is no row of the task `harbor`, or its containers can't be started.
    """
    try:
        facts = row["harbor"]
        folder, network, engine = Path(facts["folder"]), facts["network"], facts["engine"]
    except (KeyError, TypeError):
        raise FieldError("task.kind", None, "must be harbor: its rows name the folders of tasks") from None
    with within("task"), as_field_errors(ContainerFailed):
        if engine not in shared:
            shared[engine] = Containers(engine_program(engine))
        return read_task(folder, network), shared[engine]


class TaskContainer:
    """A container of a task, as it runs."""

    def __init__(self, containers: Containers, task: HarborTask, place: Place) -> None:
        self.containers, self.task, self.place = containers, task, place

    async def engine(
        self, words: Sequence[str], variables: Mapping[str, str] = NO_VARIABLES, given: bytes = b""
    ) -> tuple[int, bytes, str]:
        """Run a command of the engine; returns its exit code, the end of its output, and its errors."""
        line, folder = [self.containers.program, *words], self.containers.places.folder
        process = await start_program(line, os.environ | variables, start_new_session=True, cwd=folder)
        try:
            out, errors, _ = await read_to_end(process, given)
            await process.wait()
        except BaseException:
            self.place.close()  # the episode is over: the container ends, and with it the command
            raise
        finally:
            await ended(process)
        assert process.returncode is not None
        return process.returncode, out, errors.decode(errors="replace")

    async def start(self, port: int = 0) -> None:
        """Start it; `port`: where `net` is served, 0: nowhere.

        Raises:
            EnvironmentFailure: it can't be started.
        """
        options = ["--detach", *(f"--env={name}" for name in self.task.variables)]
        line = self.containers.command(self.task.container, self.place, [], *options, port=port)[1:]
        code, _, errors = await self.engine(line, self.task.variables)
        if code:
            raise EnvironmentFailure(f"the task's container can't be started: {last_lines(errors)}")

    async def run(
        self,
        command: Sequence[str],
        seconds: float | None,
        *,
        user: str = "",
        given: str = "",
        variables: Mapping[str, str] = NO_VARIABLES,
        joined: bool = False,
    ) -> tuple[int, str]:
        """Run a command in the container; returns its exit code, TIMED_OUT after `seconds`, and its errors, with
        `joined` its output and its errors."""
        options = ["--interactive", *(f"--env={name}" for name in variables)]
        options += [f"--user={user}"] * bool(user) + [f"--workdir={self.task.workdir}"] * bool(self.task.workdir)
        line = [*options, self.place.name, RELAY, "exec", str(math.ceil(seconds or 0)), *command]
        code, out, errors = await self.engine(["exec", *line], variables, given.encode())
        return code, out.decode(errors="replace") + errors if joined else errors

    async def reward(self) -> float:
        """Run the tests and read the reward that they have written.

        Raises:
            EnvironmentFailure: they took too long, or wrote no reward.
        """
        prepared = f"mkdir -p /tests /logs/verifier && rm -rf {' '.join(REWARDS)}"
        _require_success(*await self.run(["sh", "-c", prepared], SHORT_SECONDS, user="0"))
        source = f"{self.task.folder / 'tests'}/."
        code, _, errors = await self.engine(["cp", source, f"{self.place.name}:/tests"])
        _require_success(code, errors)
        _require_success(*await self.run(["chmod", "+x", "/tests/test.sh"], SHORT_SECONDS, user="0"))
        line = "/tests/test.sh > /logs/verifier/test-stdout.txt 2>&1"
        variables = self.task.variables | self.task.tests_variables
        code, _ = await self.run(
            ["sh", "-c", line], self.task.tests_seconds, user=self.task.tests_user, variables=variables
        )
        if code == TIMED_OUT:
            raise EnvironmentFailure(f"the tests took longer than {self.task.tests_seconds:g} s (verifier.timeout_sec)")
        for file in REWARDS:
            if (text := await self._read(file)) is not None:
                return reward_of(text, file)
        said = last_lines(await self._read("/logs/verifier/test-stdout.txt") or "")
        raise EnvironmentFailure(f"the tests ended with exit code {code} and wrote no reward: {said}")

    async def _read(self, file: str) -> str | None:
        """The text of a regular file of the container; None without one. The engine packs it: no program of the
        container takes part, and a link leads to no file outside the container."""
        code, packed, _ = await self.engine(["cp", f"{self.place.name}:{file}", "-"])
        with suppress(tarfile.TarError, AttributeError):
            if code == 0:
                with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                    member = archive.next()
                    if member is not None and member.isreg() and member.size <= LARGEST:
                        return archive.extractfile(member).read().decode(errors="replace")  # type: ignore[union-attr]
        return None


def _require_success(code: int, errors: str) -> None:
    if code:
        raise EnvironmentFailure(f"the tests can't be prepared (exit code {code}): {last_lines(errors)}")


@asynccontextmanager
async def running_task(containers: Containers, task: HarborTask, job: AgentJob) -> AsyncIterator[TaskContainer]:
    """The container of a task, for an episode.

    Raises:
        EnvironmentFailure: it can't be started.
    """
    place = containers.place(task.container)
    container = TaskContainer(containers, task, place)
    try:
        async with forwarded(place, job.base_url):
            await container.start(PORT)
            yield container
    finally:
        place.close()


def reward_of(text: str, file: str) -> float:
    """The reward in a file of the tests: a number; of an object in JSON, the value `reward`, or its only value.

    Raises:
        EnvironmentFailure: it has none.
    """
    try:
        given = json.loads(text) if file.endswith(".json") else float(text)
        if isinstance(given, dict):
            given = given["reward"] if "reward" in given else given[next(iter(given))] if len(given) == 1 else None
        reward = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise EnvironmentFailure(f"the tests wrote {text.strip()!r:.100} to {file}, which is not a reward") from None
    if not math.isfinite(reward):
        raise EnvironmentFailure(f"the tests wrote the reward {reward} to {file}")
    return reward
