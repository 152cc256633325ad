"""The agents of two roles in examples/agents: what they pay each role, and two steps of their recipes."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from proxima.cli.main import main
from proxima.config.resolution import resolve
from proxima.environment.agent_kinds import AgentSpec
from proxima.runtime.launch.run import train
from proxima.runtime.loop.training_loop import RunEnded
from tests.rollout.episodes import test_agent_player
from tests.rollout.episodes.test_agent_player import Scripted, play, prompt
from tests.runtime.episode_world import whole as whole_of
from tests.runtime.interruptions import Died, die_at, of_step
from tests.runtime.tiny_run import assert_same, steps_of

ROOT = Path(__file__).resolve().parents[2]
SUMS, NEIGHBOURS, NIM, PLAN = (
    ROOT / "examples" / "agents" / f"{name}.yaml" for name in ("sums", "neighbours", "nim", "plan")
)

pytestmark = pytest.mark.slow
RUN = "tests/examples/test_agents.py::test_a_recipe_trains_at_the_command_line_and_resumes"


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def rewards(recipe, says, monkeypatch, **columns):
    agent = resolve(str(recipe)).config.task.environment
    spec = AgentSpec(run=agent["run"], roles=tuple(agent["roles"]))
    asked = replace(prompt("What is 4 + 3?"), metadata=columns)
    monkeypatch.setattr(test_agent_player, "prompt", lambda: asked)
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


def test_both_sides_of_a_game_are_paid_against_each_other(monkeypatch):
    """A heap of 4 stones: 1, then 3 is a win of the second; a number that can't be taken loses."""

    def game(*moves):
        contexts = []

        def says(context, request):
            contexts.append(context)
            return moves[request.turn]

        return rewards(NIM, says, monkeypatch, number=0), contexts

    won, contexts = game("1", "3")
    assert won == {"first": -1.0, "second": 1.0}
    assert "has 4 stones" in contexts[0] and "has 3 stones" in contexts[1] and "has 4 stones" not in contexts[1]
    assert game("1", "2", "1")[0] == {"first": 1.0, "second": -1.0}
    assert game("1", "4")[0] == {"first": 1.0, "second": -1.0}
    assert game("three")[0] == {"first": -1.0, "second": 1.0}


def test_a_planner_is_paid_for_its_plan_and_a_worker_for_its_step(monkeypatch):
    def says(*texts):
        return lambda context, request: texts[request.turn]

    assert rewards(PLAN, says("1 and 2", "5", "7"), monkeypatch) == {"planner": 1.0, "worker": 1.0}
    assert rewards(PLAN, says("1 and 2", "6", "8"), monkeypatch) == {"planner": 0.5, "worker": 0.5}
    assert rewards(PLAN, says("2 and 2"), monkeypatch) == {"planner": 0.25, "worker": 0.0}
    assert rewards(PLAN, says("2"), monkeypatch) == {"planner": 0.0, "worker": 0.0}


@pytest.mark.parametrize(
    ("recipe", "roles"),
    [
        pytest.param(NIM, ("first", "second"), id="nim"),
        pytest.param(PLAN, ("planner", "worker"), id="plan", marks=pytest.mark.campaign(f"{RUN}[nim]")),
    ],
)
def test_a_recipe_trains_at_the_command_line_and_resumes(tiny_model, tmp_path, recipe, roles):
    """A run that ends in its second step and is resumed equals one that was not interrupted."""
    changes = [
        *(f"model.path={tiny_model('llama')}", "train.prompts_per_step=2", "train.warmup_steps=0", "seed=2"),
        *("train.completions_per_prompt=4", "eval.every=0", "eval.before=false", "eval.after=false"),
        *("model.device=cpu", "runtime.threads=1", "checkpoint.every=1", "sampling.max_tokens=16", "train.steps=3"),
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(["train", str(recipe), *changes, f"folder={whole}"]) == 0
    resolved = resolve(str(recipe), [*changes, f"folder={killed}"])
    with pytest.raises(Died):
        train(resolved.config, resolved=resolved, observer=die_at(("step", of_step(2), 1)))
    assert main(["train", str(killed), "--resume"]) == 0
    assert_same(whole_of(killed), whole_of(whole))
    steps = steps_of(whole)
    assert all({f"reward/{role}" for role in roles} <= step.keys() for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)


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
