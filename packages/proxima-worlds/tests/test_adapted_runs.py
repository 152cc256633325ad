"""Two steps of training in environments of other libraries, and by an agent from outside."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from proxima.config.resolution import resolve
from proxima.config.validate import check
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima_worlds.foreign_agents import Verifiers
from proxima_worlds.foreign_environment import ForeignEnvironment
from tests.runtime.episode_world import episode_recipe, go, whole
from tests.runtime.interruptions import Died, die_at, of_step
from tests.runtime.tiny_run import NO_EVAL, assert_same, steps_of

pytestmark = pytest.mark.slow

SERVER = Path(__file__).with_name("mcp_server.py")
AGENT = Path(__file__).parents[3] / "examples" / "agents" / "adder.py"
SEEDS = {"kind": "seeds", "count": 20}
WORLDS = {
    "textarena": {"kind": "textarena", "game": "GuessTheNumber-v0"},
    "reasoning_gym": {"kind": "reasoning_gym", "task": "chain_sum", "attempts": 2},
    "skyrl_gym": {"kind": "skyrl_gym", "env": "gsm8k_multi_turn", "extras": {"max_turns": 2}},
    "mcp": {"kind": "mcp", "command": [sys.executable, str(SERVER)]},
}


@pytest.fixture
def model(tiny_model, tmp_path):
    """A tiny model with room for what games and schemas say."""
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder


def two_steps(folder, tree):
    """The rows of the rollouts and the records of training."""
    assert go(folder, tree).status == "done"
    run = RunFolder(folder)
    records = steps_of(run.path)
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["episode/failed"] == 0 for record in records)
    return [row for step in (1, 2) for row in read_rows(run.rollout_file(step))]


def tree_of(model, world, seeds=False, **changes):
    own = {"task__environment": world, "train__steps": 2, "train__prompts_per_step": 2, **NO_EVAL}
    own |= {"task": {**SEEDS, "environment": world}} if seeds else {}
    if world["kind"] in ("mcp", "reasoning_gym"):
        own["reward"] = [{"kind": "tests.runtime.tiny_run:Even"}]
    return episode_recipe(model, **{k: v for k, v in own.items() if not (seeds and k.startswith("task__"))}, **changes)


# The server of `mcp` is ours.
OURS = pytest.mark.campaign("packages/proxima-worlds/tests/test_adapted_runs.py::test_two_steps[mcp]")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[OURS] * (kind != "mcp")) for kind in WORLDS])
def test_two_steps(kind, model, tmp_path, lent_servers):
    if kind != "mcp":
        pytest.importorskip(kind)
    rows = two_steps(tmp_path / "run", tree_of(model, WORLDS[kind], kind in ("textarena", "reasoning_gym")))
    assert len(rows) == 16 and all(row["valid"] for row in rows)
    if kind in ("textarena", "reasoning_gym", "skyrl_gym"):
        assert any(len([s for s in json.loads(row["episode"])["spans"] if s["sampled"]]) == 2 for row in rows)


def test_openenv_trains_two_steps(model, tmp_path):
    from .test_openenv import PYTHON, serving

    if not PYTHON:
        pytest.skip("PROXIMA_OPENENV_PYTHON names no interpreter with the package openenv")
    with serving(tmp_path) as url:
        world = {"kind": "openenv", "url": url, "python": PYTHON, "action": "message", "show": "heard"}
        rows = two_steps(tmp_path / "run", tree_of(model, world, True, episode__call_seconds=120))
    assert len(rows) == 16 and any(row["reward"] > 0 for row in rows)


def test_an_agent_library_trains_two_steps(model, tmp_path):
    python = os.environ.get("PROXIMA_AGENTS_PYTHON")
    if not python:
        pytest.skip("PROXIMA_AGENTS_PYTHON names no interpreter with the package openai-agents")
    world = {"kind": "agent", "command": [python, str(AGENT)], "workers": 2}
    rows = two_steps(tmp_path / "run", tree_of(model, world, train__completions_per_prompt=2))
    assert len(rows) == 8 and all(row["valid"] and row["reward"] in (0.0, 1.0) for row in rows)


def test_verifiers_trains_two_steps(model, tmp_path, monkeypatch):
    python = os.environ.get("PROXIMA_VERIFIERS_PYTHON")
    if not python:
        pytest.skip("PROXIMA_VERIFIERS_PYTHON names no interpreter with the package verifiers")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SERVER.parent), os.environ.get("PYTHONPATH", "")]))
    args = {"agent": {"harness": {"id": "adder_v1"}}}
    task = {
        "kind": "environment",
        "environment": {"kind": "verifiers", "name": "adder_v1", "python": python} | {"args": args},
    }
    own = {"task": task, "train__steps": 2, "train__prompts_per_step": 2, "train__completions_per_prompt": 2, **NO_EVAL}
    rows = two_steps(tmp_path / "run", episode_recipe(model, **own, episode__seconds=300))
    assert len(rows) == 8 and all("environment/even" in row["parts"] for row in rows)


def test_two_agents_of_verifiers_train_two_steps_and_resume(model, tmp_path, monkeypatch):
    python = os.environ.get("PROXIMA_VERIFIERS_PYTHON")
    if not python:
        pytest.skip("PROXIMA_VERIFIERS_PYTHON names no interpreter with the package verifiers")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SERVER.parent), os.environ.get("PYTHONPATH", "")]))
    world = {"kind": "verifiers", "name": "nim_v1", "python": python}
    own = {"train__steps": 2, "train__prompts_per_step": 2, "train__completions_per_prompt": 2, **NO_EVAL}
    own |= {"algorithm__advantage": {"kind": "rloo"}, "episode__seconds": 300}
    tree = episode_recipe(model, task={"kind": "environment", "environment": world}, **own)
    rows = two_steps(tmp_path / "run", tree)
    assert {json.loads(row["episode"])["player"] for row in rows} == {"first", "second"}
    assert all({"reward/first", "reward/second"} <= record.keys() for record in steps_of(tmp_path / "run"))
    watcher = die_at(("step", of_step(1), 0))
    with pytest.raises(Died):
        go(tmp_path / "killed", tree, observer=watcher)
    go(tmp_path / "killed", tree, resume=True)
    assert_same(whole(tmp_path / "killed"), whole(tmp_path / "run"))


def test_a_recipe_that_reads_one_reward_of_an_episode_is_refused_for_two_agents(model, monkeypatch):
    facts = {"sources": {}, "version": "0.4", "rewards": [], "seats": ["first", "second"]}
    monkeypatch.setattr(ForeignEnvironment, "facts", lambda self: facts)
    task = {"kind": "environment", "environment": {"kind": "verifiers", "name": "nim_v1"}}
    tree = episode_recipe(model, task=task, algorithm__advantage={"kind": "remax"}, **NO_EVAL)
    lines = [str(problem) for problem in check(resolve(tree))]
    assert any("compares with one greedy episode, not with each role" in line for line in lines)
    assert Verifiers(name="nim_v1").roles == ("first", "second")
    facts["seats"] = ["agent"]
    assert Verifiers(name="nim_v1").roles == ()
