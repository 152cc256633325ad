"""Containers of tasks in Harbor's format, and agents that play there; the task's tests give the reward."""

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from proxima.data import FieldError, as_field_errors, within
from proxima.environment.agent_kinds import AgentSandbox, AgentSpec
from proxima.environment.agents import AgentFailed, AgentJob, Agents, read_to_end, start_program
from proxima.environment.hosts import EnvironmentFailure
from proxima.system.foreign_folder import ForeignFileError, ForeignFolder
from proxima_worlds.boxed_agents import ADDRESS, ended, forwarded
from proxima_worlds.containers import (
    PORT,
    RELAY,
    ContainerFailed,
    Containers,
    Place,
    client_environment,
    engine_program,
    last_lines,
)
from proxima_worlds.harbor_tasks import HarborTask, digest_of, read_task

REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")  # the first that the tests have written
TIMED_OUT = 124  # exit code of the relay
FRESH = "/logs/verifier:rw,exec,mode=1777,size=256m"  # a file system for what the tests write
SAID = "/logs/verifier/test-stdout.txt"
# what an agent may change without a word: of no task the work
PASSING = tuple(
    f"/{name}"
    for name in (
        *("tmp", "var/tmp", "var/cache", "var/log", "run", "root", "home", "dev", "proc", "sys", "proxima"),
        *("tests", "logs", "etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/mtab"),
    )
)
MOST_SAID = 3  # tasks
STOP_AT_ONCE = ("--time", "0")
SHORT_SECONDS = 60  # in which an engine starts a container again, or reads a file of it
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
        folder = Path(facts["folder"])
        network = facts["network"]
        engine = facts["engine"]
    except (KeyError, TypeError):
        raise FieldError("task.kind", None, "must be harbor: its rows name the folders of tasks") from None
    with within("task"), as_field_errors(ContainerFailed):
        if engine not in shared:
            shared[engine] = Containers(engine_program(engine))
        more = (tuple(facts.get(name, ())) for name in ("variables", "carried"))
        return read_task(folder, network, *more), shared[engine]


class NoReward(EnvironmentFailure):
    """The tests of a task gave no reward."""


class TaskContainer:
    """A container of a task, as it runs: the agent's, or that of the tests.

    Attributes:
        volumes: those that take the place of folders of the image, by the folder; empty: none. The agent's container
            fills them, and that of the tests has them, too: what else the agent has changed is not there.
    """

    def __init__(
        self, containers: Containers, task: HarborTask, place: Place, volumes: Mapping[str, str] | None = None
    ) -> None:
        self.containers = containers
        self.task = task
        self.place = place
        self.volumes = volumes
        self._judge_place: Place | None = None
        self.tests = place.folder / "tests"  # seen at /tests, empty until the agent has ended
        self.tests.mkdir()
        self.tests.chmod(0o755)

    async def engine(self, words: Sequence[str], given: bytes = b"") -> tuple[int, bytes, str]:
        """Run a command of the engine; returns its exit code, the end of its output, and its errors."""
        line = [self.containers.program, *words]
        folder = self.containers.places.folder
        process = await start_program(line, client_environment(), start_new_session=True, cwd=folder)
        try:
            out, errors, _ = await read_to_end(process, given)
            await process.wait()
        except BaseException:
            self.close()  # the episode is over: the container ends, and with it the command
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
        options = ["--detach", *self.place.variables(self.task.variables)]
        options += [f"--volume={self.tests}:/tests:ro", f"--tmpfs={FRESH}"]
        if self.volumes is None:
            try:
                folders = await asyncio.to_thread(self.task.judged_folders, self.containers.program)
            except ContainerFailed as error:
                raise EnvironmentFailure(str(error)) from None
            named = folders if folders != ("/",) else ()
            self.volumes = {folder: f"{self.place.name}-{number}" for number, folder in enumerate(named)}
        options += [f"--volume={name}:{folder}" for folder, name in self.volumes.items()]
        line = self.containers.command(self.task.container, self.place, [], *options, port=port, keep=True)[1:]
        code, _, errors = await self.engine(line)
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
        options = ["--interactive", *self.place.variables(variables)]
        if user:
            options.append(f"--user={user}")
        if self.task.workdir:
            options.append(f"--workdir={self.task.workdir}")
        line = [*options, self.place.name, RELAY, "exec", str(math.ceil(seconds or 0)), *command]
        code, out, errors = await self.engine(["exec", *line], given.encode())
        if joined:
            return code, out.decode(errors="replace") + errors
        return code, errors

    async def reward(self) -> float:
        """Judge what the agent has done: end all that it has started, run the tests, and read the reward that they
        have written. 0 where the agent has broken what the tests need: they give a reward where no agent was.

        Raises:
            EnvironmentFailure: the tests give no reward there, either.
        """
        try:
            async with asyncio.timeout(SHORT_SECONDS + self.task.tests_seconds + SHORT_SECONDS):
                return await self._judge()
        except NoReward as error:
            reason = error
        except TimeoutError:
            reason = NoReward("the engine did not answer while the tests ran")
        if not await _tests_work(self.containers, self.task):
            raise reason
        return 0.0

    async def _judge(self) -> float:
        """Run the tests, in a container in which nothing of the agent lives.

        Raises:
            NoReward: they gave none; it can't be seen here whose fault that is.
        """
        # The container ends with all its processes. The tests have another one of the same image, with the folders of
        # the agent's work; where these are all folders, this one starts again: its files are kept, its first process is
        # ours, and the folder of rewards is a new file system.
        action = "stop" if self.volumes else "restart"
        code, _, errors = await self.engine([action, *STOP_AT_ONCE, self.place.name])
        if code:
            raise NoReward(f"the task's container can't be ended: {last_lines(errors)}")
        if not self.volumes:
            return await self._run_tests()
        self._judge_place = self.containers.place(self.task.container)
        judge = TaskContainer(self.containers, self.task, self._judge_place, self.volumes)
        try:
            await judge.start()
        except EnvironmentFailure as error:
            raise NoReward(str(error)) from None
        reward = await judge._run_tests()
        if not reward:
            await self._say_what_is_unseen()
        return reward

    async def _say_what_is_unseen(self) -> None:
        """Say what the agent has changed that the tests did not see, once for each of the first tasks: if that was its
        work, `carried` is to name the folders."""
        known = self.containers.unseen_said
        task = str(self.task.folder)
        if task in known or len(known) == MOST_SAID:
            return
        code, said, _ = await self.engine(["diff", self.place.name])
        changes = [line[2:] for line in said.decode(errors="replace").splitlines() if line[:2] in ("A ", "C ")]
        seen = [*(self.volumes or {}), *PASSING]
        unseen = [path for path in changes if not any(PurePosixPath(path).is_relative_to(top) for top in seen)]
        leaves = [
            path
            for path in unseen
            if path != "/etc" and not any(other.startswith(f"{path}/") for other in changes)  # the engine writes there
        ]
        if not code and leaves:
            known.add(task)
            named = ", ".join(repr(path)[:100] for path in leaves[:3])
            print(
                f"harbor: the agent of {self.task.folder.name} has also changed {named} ({len(leaves)} in all), which "
                "its tests do not see: if its work lies there, name the folder in task.carried",
                file=sys.stderr,
                flush=True,
            )

    async def _run_tests(self) -> float:
        """Run the tests in this container. Only now do they enter, where nobody can write.

        Raises:
            NoReward: they gave none.
        """
        for file in REWARDS:
            if await self._read(file) is not None:
                return 0.0  # not the new file system: the agent has made the path lead to files of its own
        await asyncio.to_thread(self._show_tests)
        variables = self.task.variables | self.task.tests_variables
        line = f"/tests/test.sh > {SAID} 2>&1"
        code, errors = await self.run(
            ["/bin/sh", "-c", line], self.task.tests_seconds, user=self.task.tests_user or "0", variables=variables
        )
        if code == TIMED_OUT:
            raise NoReward(f"the tests took longer than {self.task.tests_seconds:g} s (verifier.timeout_sec)")
        for file in REWARDS:
            text = await self._read(file)
            if text is not None:
                return reward_of(text, file)
        said = last_lines(await self._read(SAID) or errors)
        raise NoReward(f"the tests ended with exit code {code} and wrote no reward: {said}")

    def _show_tests(self) -> None:
        try:
            ForeignFolder(self.task.folder / "tests").copy(self.tests)
            program = self.tests / "test.sh"
            program.chmod(program.stat().st_mode | 0o111)
        except (ForeignFileError, OSError) as error:
            raise NoReward(f"the tests can't be copied: {error}") from None

    async def _read(self, file: str) -> str | None:
        """The text of a regular file of the container; None without one. No program of the container takes part, and a
        link leads to no file outside the container."""
        line = ["exec", "--user=0", self.place.name, RELAY, "read", file]
        code, text, _ = await self.engine(line)
        if code:
            return None
        return text.decode(errors="replace")

    def close(self) -> None:
        """End the container, and that of its tests; may be called twice."""
        places = [self.place]
        if self._judge_place:
            places.append(self._judge_place)
        volumes = list((self.volumes or {}).values())
        self.containers.remove(places, volumes)


async def _tests_work(containers: Containers, task: HarborTask) -> bool:
    """True if the tests of a task give a reward in a container of its own, in which no agent was."""
    key = (str(task.folder), task.container.image, digest_of(task.folder / "tests"))
    if key in containers.working_tests:
        return True
    container = TaskContainer(containers, task, containers.place(task.container))
    try:
        async with asyncio.timeout(SHORT_SECONDS + task.tests_seconds + SHORT_SECONDS):
            await container.start()
            await container._judge()
    except (EnvironmentFailure, TimeoutError):
        return False
    finally:
        container.close()
    containers.working_tests.add(key)
    return True


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
        container.close()


def _reward_in(values: Mapping[str, Any]) -> Any:
    """The value `reward`, or the only value; None: there are several others."""
    if "reward" in values:
        return values["reward"]
    if len(values) == 1:
        return next(iter(values.values()))
    return None


def reward_of(text: str, file: str) -> float:
    """The reward in a file of the tests: a number; of an object in JSON, the value `reward`, or its only value.

    Raises:
        NoReward: it has none.
    """
    try:
        given: Any = json.loads(text) if file.endswith(".json") else float(text)
        if isinstance(given, dict):
            given = _reward_in(given)
        reward = float(given)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise NoReward(f"the tests wrote {text.strip()!r:.100} to {file}, which is not a reward") from None
    if not math.isfinite(reward):
        raise NoReward(f"the tests wrote the reward {reward} to {file}")
    return reward
