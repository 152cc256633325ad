"""Plays tasks in Harbor's format: an agent, or the model with a tool `bash`, in the task's container, whose tests give
the reward."""

import asyncio
import io
import json
import math
import os
import tarfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from proxima.data import FieldError, as_field_errors, within
from proxima.environment.agent_kinds import AgentSandbox, AgentSpec
from proxima.environment.agents import AgentJob, Agents, read_to_end, start_program
from proxima.environment.hosts import EnvironmentFailure
from proxima.system.http_clients import async_http_client
from proxima_worlds.boxed_agents import ADDRESS, ended, forwarded
from proxima_worlds.containers import PORT, RELAY, ContainerFailed, Containers, Place, engine_program, last_lines
from proxima_worlds.harbor_tasks import HarborTask, read_task

REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")  # the first that the tests have written
TIMED_OUT = 124  # exit code of the relay
CALL_SECONDS = 120.0  # of a command that the model runs
LONGEST_COMMAND = 100_000  # bytes; Linux limits an argument to 128 KiB
SHOWN = 4000  # characters of its output that the model sees
LARGEST = 1 << 20  # bytes of a reward file
SHORT_SECONDS = 60  # of commands that prepare the tests
REFUSALS = (400, 401)  # the endpoint's, at a limit of the episode
NO_VARIABLES: Mapping[str, str] = {}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell of the computer and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "the command"}},
            "required": ["command"],
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class HarborBox(AgentSandbox):
    """The container of the row's task, whose tests give the reward; there, without a command, the model acts by a tool
    `bash`."""

    needs_command: ClassVar[bool] = False

    def agents(self, spec: AgentSpec) -> Agents:
        return HarborAgents(spec)


class HarborAgents:
    """Agents that play Harbor tasks, one container an episode.

    Args:
        spec: of an agent; without a command, the model runs commands itself, by a tool `bash`.
    """

    def __init__(self, spec: AgentSpec) -> None:
        self.command = tuple(spec.command)
        self._places = asyncio.Semaphore(spec.workers or 16)
        self._containers: dict[str, Containers] = {}  # by engine

    async def play(self, job: AgentJob) -> float | None:
        try:
            facts = job.row["harbor"]
            folder, network, engine = Path(facts["folder"]), facts["network"], facts["engine"]
        except (KeyError, TypeError):
            bound = "needs rows of the task `harbor`"
            raise FieldError("task.environment.sandbox", "harbor", bound) from None
        with within("task"), as_field_errors(ContainerFailed):
            task, containers = read_task(folder, network), self._containers_of(engine)
        async with self._places, running_task(containers, task, job) as container:
            if self.command:
                code, errors = await container.run(
                    self.command, task.agent_seconds, user=task.agent_user, given=json.dumps(dict(job.row)),
                    variables=job.variables(ADDRESS) | task.variables,
                )  # fmt: skip
                if code not in (0, TIMED_OUT):
                    raise EnvironmentFailure(f"the agent ended with exit code {code}: {last_lines(errors)}")
            else:
                await act(container, job, task.agent_seconds or math.inf)
            return await container.reward()

    def _containers_of(self, engine: str) -> Containers:
        if engine not in self._containers:
            self._containers[engine] = Containers(engine_program(engine))
        return self._containers[engine]

    def close(self) -> None:
        for containers in self._containers.values():
            containers.close()


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
            options = ["--detach", *(f"--env={name}" for name in task.variables)]
            line = containers.command(task.container, place, [], *options, port=PORT)[1:]
            code, _, errors = await container.engine(line, task.variables)
            if code:
                raise EnvironmentFailure(f"the task's container can't be started: {last_lines(errors)}")
            yield container
    finally:
        place.close()


async def act(container: TaskContainer, job: AgentJob, seconds: float) -> None:
    """Let the model run commands until it calls no tool, or a limit of the episode or `seconds` are reached."""
    messages, deadline = list(job.row["messages"]), time.monotonic() + seconds
    headers = {"Authorization": f"Bearer {job.api_key}"}
    async with async_http_client(job.base_url, base_url=job.base_url, headers=headers, timeout=None) as client:
        while (left := deadline - time.monotonic()) > 0:
            asked = client.post("/chat/completions", json={"model": job.model, "messages": messages, "tools": [BASH]})
            try:
                response = await asyncio.wait_for(asked, None if math.isinf(left) else left)
            except TimeoutError:
                return
            if response.status_code in REFUSALS and len(messages) > len(job.row["messages"]):
                return
            if response.is_error:
                raise EnvironmentFailure(f"the policy was not asked: {response.text:.300}")
            said = response.json()["choices"][0]["message"]
            messages.append(said)
            if not said.get("tool_calls"):
                return
            for call in said["tool_calls"]:
                most = max(1.0, min(CALL_SECONDS, deadline - time.monotonic()))
                content = await _called(container, call["function"], most)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def _called(container: TaskContainer, call: dict[str, str], seconds: float) -> str:
    arguments = json.loads(call["arguments"])
    given = arguments.get("command")
    if call["name"] != "bash" or not isinstance(given, str) or "\0" in given or len(given.encode()) > LONGEST_COMMAND:
        bound = f"a text of at most {LONGEST_COMMAND:,} bytes without NUL"
        return f"error: the only tool is bash, whose argument `command` is {bound}"
    command = ["sh", "-c", given]
    code, said = await container.run(
        command, seconds, user=container.task.agent_user, variables=container.task.variables, joined=True
    )
    if len(said) > SHOWN:
        said = f"{said[: SHOWN // 2]}\n...\n{said[-SHOWN // 2 :]}"
    ending = f"timed out after {seconds:.0f} s" if code == TIMED_OUT else f"exit code {code}"
    return f"{said.strip()}\n({ending})" if code else said.strip() or "(no output)"


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
