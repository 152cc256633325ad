"""The agents of two roles in examples/agents: what they pay each role, and two steps of their recipes."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from proxima.config.resolution import resolve
from proxima.environment.agent_kinds import AgentSpec
from proxima.runtime.launch.run import train
from proxima.runtime.loop.training_loop import RunEnded
from tests.rollout.episodes import test_agent_player
from tests.rollout.episodes.test_agent_player import Scripted, play, prompt
from tests.runtime.tiny_run import steps_of

ROOT = Path(__file__).resolve().parents[2]
SUMS, NEIGHBOURS = (ROOT / "examples" / "agents" / f"{name}.yaml" for name in ("sums", "neighbours"))

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def rewards(recipe, says, monkeypatch):
    agent = resolve(str(recipe)).config.task.environment
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
    assert rewards(SUMS, says, monkeypatch) == {"proposer": 4 * 0.75 * 0.25} | solved
    assert rewards(SUMS, lambda context, request: "none", monkeypatch) == {"proposer": -1.0}


def test_a_neighbour_is_paid_for_its_own_answer(monkeypatch):
    def says(up, down):
        def answer(context, request):
            asked = "comes after 4?" if request.turn == 0 else f"comes before {up or 4}?"
            assert asked in context
            return (up, down)[request.turn] or "none"

        return answer

    assert rewards(NEIGHBOURS, says("5", "4"), monkeypatch) == {"up": 1.0, "down": 1.0}
    assert rewards(NEIGHBOURS, says("7", "6"), monkeypatch) == {"up": 0.0, "down": 1.0}
    assert rewards(NEIGHBOURS, says("5", "5"), monkeypatch) == {"up": 1.0, "down": 0.0}
    assert rewards(NEIGHBOURS, says("", "3"), monkeypatch) == {"up": 0.0, "down": 1.0}


@pytest.mark.parametrize(
    ("recipe", "role", "ending"),
    [(SUMS, "proposer", nullcontext()), (NEIGHBOURS, "up", pytest.raises(RunEnded, match="every advantage was 0"))],
)
def test_two_steps_of_the_recipe(tiny_model, tmp_path, recipe, role, ending):
    """A tiny model names no neighbour of a number, so that all rewards are 0."""
    changes = [
        *(f"model.path={tiny_model('llama')}", "train.steps=2", "train.prompts_per_step=2", "train.warmup_steps=0"),
        *("train.completions_per_prompt=2", "eval.every=0", "eval.before=false", "eval.after=false"),
        *("model.device=cpu", "runtime.threads=1", "checkpoint.every=0", f"folder={tmp_path / 'run'}"),
    ]
    with ending:
        assert train(resolve(str(recipe), changes).config).status == "done"
    first, second = steps_of(tmp_path / "run")
    assert -1 <= first[f"reward/{role}"] <= 1 and second["episode/failed"] == 0
