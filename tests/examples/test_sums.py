"""The agent of two roles in examples/agents: what it pays each of them, and two steps of its recipe."""

from pathlib import Path

import pytest

from proxima.config.resolution import resolve
from proxima.environment.agents import AgentSpec
from proxima.runtime.launch.run import train
from tests.rollout.episodes import test_agent_player
from tests.rollout.episodes.test_agent_player import Scripted, play, prompt
from tests.runtime.tiny_run import steps_of

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "agents" / "sums.yaml"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def rewards(says, monkeypatch):
    agent = resolve(str(RECIPE)).config.task.environment
    spec = AgentSpec(run=agent["run"], roles=tuple(agent["roles"]))
    monkeypatch.setattr(test_agent_player, "prompt", lambda: prompt("What is 4 + 3?"))
    (completion,) = play(Scripted(says), spec, roles=spec.roles, max_tokens=12)
    assert not completion.episode.failure
    return completion.episode.rewards


def test_attempts_are_paid_for_the_sum_and_the_proposal_for_their_disagreement(monkeypatch):
    def says(context, request):
        assert ("Choose" in context) == (request.turn == 0) and ("What is 4 + 20?" in context) == (request.turn > 0)
        return "20" if request.turn == 0 else "24" if request.turn < 4 else "It is 25."

    solved = {"solver/0": 1.0, "solver/1": 1.0, "solver/2": 1.0, "solver/3": 0.0}
    assert rewards(says, monkeypatch) == {"proposer": 4 * 0.75 * 0.25} | solved
    assert rewards(lambda context, request: "none", monkeypatch) == {"proposer": -1.0}


def test_two_steps_of_the_recipe(tiny_model, tmp_path):
    changes = [
        *(f"model.path={tiny_model('llama')}", "train.steps=2", "train.prompts_per_step=2", "train.warmup_steps=0"),
        *("train.completions_per_prompt=2", "eval.every=0", "eval.before=false", "eval.after=false"),
        *("model.device=cpu", "runtime.threads=1", "checkpoint.every=0", f"folder={tmp_path / 'run'}"),
    ]
    assert train(resolve(str(RECIPE), changes).config).status == "done"
    first, second = steps_of(tmp_path / "run")
    assert -1 <= first["reward/proposer"] <= 1 and second["episode/failed"] == 0
