"""The tool `bash` of Harbor's tasks is an environment like any other, played here on a fake engine; test_harbor.py has
podman."""

import asyncio
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from proxima.data import FieldError
from proxima.engine.protocol import Request, Sampling
from proxima.environment.agent_kinds import AgentSpec
from proxima.environment.concurrent_hosts import ConcurrentHosts
from proxima.environment.interface import EnvironmentSpec
from proxima.rollout.episodes.player import Episodes, Rules
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.episodes.tool_use import ToolUses
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.task import TASKS
from proxima_worlds import containers
from tests.harbor_tasks import write_tasks
from tests.rollout.episodes.test_agent_player import TOKENIZER, Scripted, prompt
from tests.runtime.episode_world import episode_recipe, go
from tests.runtime.tiny_run import NO_EVAL

CONTEXT = 4000


@pytest.fixture
def task(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "podman"
    root = tmp_path / "root"
    program.parent.mkdir()
    root.mkdir()
    program.write_text(f"#!{sys.executable}\n" + Path(__file__).with_name("fake_engine.py").read_text())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(containers, "compile_relay", lambda folder: _relay(folder))
    return TASKS["harbor"](path=str(write_tasks(tmp_path / "tasks")))


def _relay(folder):
    (folder / "relay").touch()
    return folder / "relay"


def play(task, says, number=0, **settings):
    """The completion of an episode, as a run plays it."""
    row = task.rows(0)[number]
    hosts = ConcurrentHosts(EnvironmentSpec(kind=task.environment))
    rules = Rules(settings=EpisodeSettings(retries=0, **settings), context=CONTEXT, rewards=True)
    uses = ToolUses(TOKENIZER, {}, "hermes")
    asked = replace(prompt(row.messages[0]["content"]), metadata=dict(row.metadata))
    requests = [Request(prompt=asked, sample=0, sampling=Sampling(max_tokens=CONTEXT // 10))]

    async def run():
        episodes = Episodes(Scripted(says), hosts, uses, rules)
        return [completion async for completion in episodes.generate(requests)]

    try:
        (completion,) = asyncio.run(run())
    finally:
        hosts.close()
    return completion


def bash(command):
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


@pytest.mark.slow
def test_a_policy_acts_by_the_tool_bash(task):
    seen = []

    def says(context, request):
        seen.append(context)
        return [bash("echo 42 > sum.txt; echo said; exit 4"), bash("echo \0"), "done"][request.turn]

    completion = play(task, says)
    assert completion.episode.failure == "" and completion.episode.reward == 1.0
    assert len(completion.episode.turns) == 3
    assert "said" in seen[1] and "(exit code 4)" in seen[1]
    assert "error: command must be a text of at most 100,000 bytes without NUL" in seen[2]


@pytest.mark.slow
def test_the_tests_judge_what_was_done_until_a_limit(task):
    assert play(task, lambda context, request: "I can't.").episode.reward == 0.0
    completion = play(task, lambda context, request: bash(f"echo {40 + 2 * request.turn} > sum.txt"), turns=2)
    assert completion.episode.cut == "turns" and completion.episode.reward == 1.0


@pytest.mark.slow
def test_tests_without_a_reward_fail_the_episode(task, tmp_path):
    write_tasks(tmp_path / "tasks", **{"tests/test.sh": "#!/bin/sh\necho broken; exit 1\n"})
    completion = play(TASKS["harbor"](path=str(tmp_path / "tasks")), lambda context, request: "done")
    assert "the tests ended with exit code 1 and wrote no reward: broken" in completion.episode.failure


def test_an_agent_there_needs_a_command():
    with pytest.raises(FieldError, match="must be given, or `command`"):
        AgentSpec(sandbox="harbor")


@pytest.mark.slow
def test_a_run_trains_on_tasks(task, tiny_model, tmp_path):
    """Its episodes are tried before weights load, and played as those of any other environment."""
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    own = {"kind": "harbor", "path": task.path}
    rewards = [{"kind": "environment"}, {"kind": "tests.runtime.tiny_run:Even"}]
    tree = episode_recipe(folder, task=own, reward=rewards, train__steps=1, train__prompts_per_step=2, **NO_EVAL)
    tree["task"] = own
    assert go(tmp_path / "run", tree).status == "done"
    rows = [*read_rows(RunFolder(tmp_path / "run").rollout_file(1))]
    assert rows and all(json.loads(row["episode"])["failure"] == "" and row["valid"] for row in rows)
