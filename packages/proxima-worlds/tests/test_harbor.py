"""Tasks in Harbor's format, played in podman: by their solution, by an agent, and by a policy with the tool `bash`."""

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import httpx
import pytest

from proxima.data import FieldError
from proxima.engine.protocol import Request, Sampling
from proxima.environment.agent_kinds import AgentSpec
from proxima.environment.agents import AgentJob
from proxima.environment.hosts import EnvironmentFailure
from proxima.rollout.episodes.agent_player import AgentEpisodes
from proxima.rollout.episodes.conversation import TurnTemplate
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.task import TASKS
from proxima_worlds import harbor_agents
from proxima_worlds.harbor_agents import reward_of, running_task, task_of
from tests.containers import busybox_image as busybox_image
from tests.containers import left
from tests.harbor_tasks import write_tasks
from tests.processes import eventually, family, with_word
from tests.rollout.episodes.test_agent_player import TOKENIZER, Scripted, prompt

from .test_harbor_shell import bash
from .test_harbor_shell import play as act

pytestmark = [pytest.mark.slow, pytest.mark.waits]
SOLUTIONS = {"answer": "set -- $(cat numbers.txt); echo $(($1 + $2)) > sum.txt", "word": "echo $WORD > word.txt"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def task(busybox_image, folder):
    task = TASKS["harbor"](path=str(folder))
    task.prepare()
    return task


@pytest.fixture(scope="module")
def shared():
    shared = {}
    yield shared
    for each in shared.values():
        each.close()


def in_container(shared, task, number, what):
    """What a function returns of the running container of a task, of this number."""
    row = {"harbor": task.rows(0)[number].metadata["harbor"]}

    async def run():
        job = AgentJob(row=row, base_url="http://127.0.0.1:9/v1", api_key="k")
        read, containers = task_of(row, shared)
        async with running_task(containers, read, job) as container:
            return await what(container)

    return asyncio.run(run())


async def solve(container):
    """As harbor's oracle does."""
    await container.run(["mkdir", "-p", "/solution"], 60, user="0")
    await container.engine(["cp", f"{container.task.folder}/solution/.", f"{container.place.name}:/solution"])
    assert (await container.run(["sh", "/solution/solve.sh"], 60, variables=container.task.variables))[0] == 0
    return await container.reward()


def test_rows_are_the_instructions(folder):
    rows = TASKS["harbor"](path=str(folder)).rows(0)
    assert [row.messages[0]["content"].split()[0] for row in (rows[0], rows[1])] == ["Write", "Write"] and len(
        rows
    ) == 2
    assert TASKS["harbor"](path=str(folder / "word")).rows(0)[0] == rows[1]


@pytest.mark.parametrize("number", [0, 1])
def test_the_solution_is_worth_one_and_nothing_zero(task, shared, number):
    assert in_container(shared, task, number, solve) == 1.0
    assert in_container(shared, task, number, lambda container: container.reward()) == 0.0
    eventually(lambda: left() == [])


def play(task, policy, number, context=4000, turns=8, **fields):
    row = task.rows(0)[number]
    agents = AgentSpec(sandbox="harbor", **fields).build()
    asked = replace(prompt(row.messages[0]["content"]), metadata=dict(row.metadata))

    async def run():
        settings = EpisodeSettings(retries=0, seconds=600, turns=turns)
        episodes = AgentEpisodes(policy, agents, partial(TurnTemplate, TOKENIZER, {}), settings, context, "hermes")
        requests = [Request(prompt=asked, sample=0, sampling=Sampling(max_tokens=context // 10))]
        try:
            return [completion async for completion in episodes.generate(requests)]
        finally:
            agents.close()

    (completion,) = asyncio.run(run())
    return completion


@pytest.mark.parametrize(("name", "number"), [("answer", 0), ("word", 1)])
def test_a_policy_acts_by_the_tool_bash(task, name, number):
    def says(context, request):
        if request.turn == 0:
            return bash(SOLUTIONS[name] + "; echo said; exit 4")
        assert "said" in context and "(exit code 4)" in context
        return "done"

    completion = act(task, says, number)
    assert completion.episode.failure == "" and completion.episode.reward == 1.0
    assert len(completion.episode.turns) == 2
    eventually(lambda: left() == [])


ASKS = """
wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \\
  --post-data '{"messages": [{"role": "user", "content": "begin"}]}' $OPENAI_BASE_URL/chat/completions > /tmp/said
"""


@pytest.mark.parametrize(
    ("code", "reward", "failure"),
    [
        ("echo 42 > sum.txt", 1.0, ""),
        ("echo 43 > sum.txt", 0.0, ""),
        ("echo why >&2; exit 5", None, "the agent ended with exit code 5: why"),
    ],
)
def test_an_agent_plays_in_the_container_of_the_task(task, code, reward, failure):
    policy = Scripted(lambda context, request: "fine")
    completion = play(task, policy, 0, command=("sh", "-c", ASKS + code))
    assert (completion.episode.reward, completion.episode.failure) == (reward, failure)


BROKEN = "the tests ended with exit code 1 and wrote no reward: broken"
CRASHED = "the agent ended with exit code 5: said"


class NoContainer:
    """In place of a task's container: its program asks so often and ends with a code, and the tests gave this."""

    def __init__(self, job, asks, code, given):
        self.job, self.asks, self.code, self.given = job, asks, code, given

    async def run(self, command, seconds, **options):
        head = {"Authorization": f"Bearer {self.job.api_key}"}
        async with httpx.AsyncClient(headers=head, timeout=600) as client:
            for _ in range(self.asks):
                chat = {"messages": [{"role": "user", "content": "begin"}]}
                await client.post(f"{self.job.base_url}/chat/completions", json=chat)
        return self.code, "said"

    async def reward(self):
        if self.given is None:
            raise EnvironmentFailure(BROKEN)
        return self.given


@pytest.mark.parametrize(
    ("asks", "code", "given", "failure"),
    [(2, 0, 0.5, ""), (2, 0, None, BROKEN), (2, 5, 0.5, ""), (2, 5, None, CRASHED), (1, 5, 0.5, CRASHED)],
)
def test_a_limit_excuses_the_agent_and_not_the_tests(monkeypatch, asks, code, given, failure):
    """The episode has one turn."""

    @asynccontextmanager
    async def running(containers, task, job):
        yield NoContainer(job, asks, code, given)

    monkeypatch.setattr(harbor_agents, "running_task", running)
    task = SimpleNamespace(agent_seconds=None, agent_user="", variables={})
    monkeypatch.setattr(harbor_agents, "task_of", lambda row, shared: (task, None))
    row = SimpleNamespace(messages=[{"content": "begin"}], metadata={})
    policy = Scripted(lambda context, request: "fine")
    episode = play(SimpleNamespace(rows=lambda seed: [row]), policy, 0, turns=1, command=("agent",)).episode
    scored = ("turns", given) if not failure else ("", None)
    assert (episode.failure, episode.cut, episode.reward) == (failure, *scored)


@pytest.mark.parametrize(
    ("file", "text", "failure"),
    [
        ("tests/test.sh", "#!/bin/sh\necho broken; exit 1\n", "exit code 1 and wrote no reward: broken"),
        ("tests/test.sh", "#!/bin/sh\nsleep 100\n", "took longer than 2 s"),
        ("tests/test.sh", "#!/bin/sh\nln -s /etc/hostname /logs/verifier/reward.txt\n", "wrote no reward"),
    ],
)
def test_tests_without_a_reward_are_a_failure(busybox_image, shared, tmp_path, file, text, failure):
    toml = "[environment]\nmemory_mb = 64\n[verifier]\ntimeout_sec = 2\n"
    task = TASKS["harbor"](path=str(write_tasks(tmp_path, **{file: text, "task.toml": toml})))
    task.prepare()
    with pytest.raises(EnvironmentFailure) as error:
        in_container(shared, task, 0, lambda container: container.reward())
    assert failure in str(error.value)


@pytest.mark.parametrize(
    ("text", "file", "reward"),
    [
        ("0.25\n", "r.txt", 0.25),
        ("3", "r.json", 3.0),
        ('{"reward": 1, "b": 0}', "r.json", 1.0),
        ('{"b": 0.5}', "r.json", 0.5),
    ],
)
def test_rewards(text, file, reward):
    assert reward_of(text, file) == reward


@pytest.mark.parametrize(
    ("text", "file"),
    [
        *[(text, "r.txt") for text in ("", "nan", "1e999", "much")],
        *[(text, "r.json") for text in ('{"a": 1, "b": 0}', "[1]", "[" * 100_000, "9" * 400)],
    ],
)
def test_what_is_no_reward(text, file):
    with pytest.raises(EnvironmentFailure):
        reward_of(text, file)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("task.toml", "[environment\n", "can't be read as a Harbor task"),
        ("task.toml", '[environment]\nos = "windows"\n[[steps]]\nname = "a"\n', "uses steps, environment.os"),
        ("task.toml", '[environment]\nmemory = "lots"\n', "wrong value: memory = 'lots'"),
        ("task.toml", "[environment]\nmemory = 2048\n", "wrong value: memory = 2048"),
        ("task.toml", "[environment]\nmemory_mb = 8\n", "memory_mb=8 must be >= 16"),
        ("task.toml", "[environment]\nmemory_mb = inf\n", "wrong value: memory_mb = inf"),
        ("task.toml", "[environment]\ncpus = nan\n", "wrong value: cpus = nan"),
        ("task.toml", '[environment]\ndocker_image = "-v/:/host"\n', "image='-v/:/host' is not the name"),
        ("task.toml", "[environment]\nworkdir = 5\n", "wrong value: workdir = 5"),
        ("task.toml", "agent = 5\n", "wrong value: agent = 5"),
        ("task.toml", '[agent]\ntimeout_sec = "60"\n', "wrong value: timeout_sec = '60'"),
        ("task.toml", "[verifier]\ntimeout_sec = -1\n", "wrong value: timeout_sec = -1"),
        ("task.toml", "[environment.env]\nA = 1\n", "env has A = 1"),
        ("task.toml", '[environment.env]\n"A=B" = "1"\n', "env has A=B"),
        ("task.toml", '[verifier.env]\nA = "\\u0000"\n', "env has A = "),
        ("task.toml", '[environment.env]\nA = "${HF_TOKEN}"\n', "'HF_TOKEN', not named in task.variables"),
        ("task.toml", '[environment.env]\nA = "1\\n2"\n', "must be a text of one line"),
    ],
)
def test_tasks_that_are_refused(tmp_path, file, text, message):
    folder = write_tasks(tmp_path, **{file: text})
    with pytest.raises(FieldError, match=message):
        TASKS["harbor"](path=str(folder)).rows(0)


def test_an_image_that_can_not_be_built(busybox_image, tmp_path):
    folder = write_tasks(tmp_path, **{"environment/Dockerfile": f"FROM {busybox_image}\nCOPY nothing /\n"})
    with pytest.raises(FieldError, match="can't be built") as error:
        TASKS["harbor"](path=str(folder)).prepare()
    assert error.value.field == "path" and "\n" not in str(error.value)


PARENT = """
import asyncio, json, sys
from proxima.environment.agent_kinds import AgentSpec
from proxima.environment.agents import AgentJob
row = {"harbor": json.loads(sys.argv[1])}
agents = AgentSpec(sandbox="harbor", command=("sleep", "1000")).build()
asyncio.run(agents.play(AgentJob(row=row, base_url="http://127.0.0.1:9/v1", api_key="k")))
"""


def test_a_killed_run_leaves_no_container_of_a_task(task):
    facts = json.dumps(task.rows(0)[1].metadata["harbor"])
    with subprocess.Popen([sys.executable, "-c", PARENT, facts]) as run:
        eventually(lambda: {*with_word("cmdline", "exec")} & {*family(run.pid)})
        assert len(left(run.pid)) == 2  # with the volume of the folder of work
        run.kill()
    eventually(lambda: left(run.pid) == [])
