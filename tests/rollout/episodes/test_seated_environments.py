"""Environments with roles, each with a chat of its own. One of them is a game that an agent plays, too, to the same
tokens."""

import asyncio
import json
import shutil
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from proxima.data import FieldError, UserError
from proxima.data.flow import Prompt
from proxima.engine.protocol import Request, Sampling
from proxima.environment.agents import SCRIPT, ProcessAgents
from proxima.model.chat.encode import prompt_tokens
from proxima.rollout.episodes.agent_player import AgentEpisodes
from proxima.rollout.episodes.conversation import TurnTemplate
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.episodes.worlds import AgentWorld, Play, make_worlds
from proxima.task.protocol import PlayedTask
from tests.rollout.episodes.seated_worlds import PLAYERS
from tests.rollout.episodes.test_agent_player import TOKENIZER, Scripted
from tests.runtime.episode_world import episode_recipe, go
from tests.runtime.tiny_run import NO_EVAL, traces
from tests.uvicorn_ticks import quick_ticks

WORLDS = "tests.rollout.episodes.seated_worlds"
CONTEXT = 4000
MODEL = SimpleNamespace(tokenizer=TOKENIZER, context=CONTEXT)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("lent_servers")]


def prompt(content="", **metadata):
    messages = ({"role": "user", "content": content},)
    return Prompt(uid=3, messages=messages, tokens=prompt_tokens(messages, TOKENIZER), answer="4", metadata=metadata)


def world_of(name, stack, asked, settings, **arguments):
    task = PlayedTask(environment={"kind": f"{WORLDS}:{name}", **arguments})
    play = Play(settings=settings, system=None, arguments={}, seed=1)
    world = make_worlds({"task": task}, {"task": [asked]}, MODEL, play, [])["task"]
    stack.callback(world.close)
    assert isinstance(world, AgentWorld)
    return world


def completions(player, asked, samples):
    async def run():
        sampling = Sampling(max_tokens=200)
        requests = [Request(prompt=asked, sample=i, sampling=sampling, seed=1) for i in range(samples)]
        return sorted([each async for each in player.generate(requests)], key=lambda each: each.sample)

    return asyncio.run(run())


def play(name, says, asked, samples=1, *, settings=None, **arguments):
    policy = Scripted(says)
    given = EpisodeSettings(**{"retries": 0, "tool_format": "hermes"} | (settings or {}))
    with ExitStack() as stack:
        world = world_of(name, stack, asked, given, **arguments)
        return completions(world.player(policy), asked, samples), policy


def moves(context, request):
    """In the first game each takes 2, in the second 3, in the third what is refused."""
    return ["I take 2", "3", "9"][request.sample]


@quick_ticks()
def test_a_game_has_the_same_tokens_as_when_an_agent_plays_it():
    pytest.importorskip("openai")
    asked = prompt("", number=5)
    mine, _ = play("Nim", moves, asked, 3)
    agents = ProcessAgents((sys.executable, str(SCRIPT), "examples.agents.nim:play"), 1)
    settings = EpisodeSettings(retries=0, tool_format="hermes")
    template = partial(TurnTemplate, TOKENIZER, {})
    player = AgentEpisodes(Scripted(moves), agents, template, settings, CONTEXT, "hermes", roles=PLAYERS)
    try:
        theirs = completions(player, asked, 3)
    finally:
        agents.close()
    for own, other in zip(mine, theirs, strict=True):
        assert own.episode.failure == other.episode.failure == ""
        assert own.episode.rewards == other.episode.rewards and {*own.episode.rewards} == {*PLAYERS}
        for path, twin in zip(own.paths, other.paths, strict=True):
            assert path.episode.player == twin.episode.player
            assert np.array_equal(path.tokens, twin.tokens) and np.array_equal(path.sampled, twin.sampled)
            assert [span.turn for span in path.episode.spans] == [span.turn for span in twin.episode.spans]
    assert [each.episode.rewards["first"] for each in mine] == [-1.0, 1.0, -1.0]
    assert mine[0].episode.parts == {"moves": 4.0}  # of nine stones; the fifth would take one too many


def test_a_right_move_may_be_paid_by_itself():
    (completion,), _ = play("Nim", moves, prompt("", number=5), pays=0.5)
    paid = [span.reward for path in completion.paths for span in path.episode.turns]
    assert paid.count(0.5) == 4 and {*paid} == {0.0, 0.5}
    assert sum(completion.episode.rewards.values()) == pytest.approx(sum(paid))


def test_a_role_calls_tools_in_its_own_chat():
    call = '<tool_call>{"name": "price", "arguments": {}}</tool_call>'

    def says(context, request):
        return [call, "5", "6"][request.turn]

    (completion,), policy = play("Bidder", says, prompt("A lamp. "))
    assert completion.episode.failure == "" and completion.episode.rewards == {"buyer": 6.0, "seller": 5.0}
    seen = [TOKENIZER.decode(request.prompt.tokens) for request in policy.requests]
    assert "A lamp. Bid." in seen[0] and "4" in seen[1].partition("A lamp. Bid.")[2]
    assert "Bid, too." in seen[2] and "A lamp." not in seen[2]


def test_a_limit_ends_the_game_which_is_scored():
    (completion,), _ = play("Nim", moves, prompt("", number=5), settings={"turns": 2})
    assert (completion.episode.cut, completion.episode.failure) == ("turns", "")
    assert completion.episode.rewards == {"first": 0.0, "second": 0.0}


@pytest.mark.parametrize("where", ["respond", "get_reward"])
@pytest.mark.parametrize("limits", [{}, {"turns": 1}])
def test_a_fault_of_the_environment_is_no_reward(where, limits):
    if where == "respond" and limits:
        limits = {"turns": 3}
    (completion,), _ = play("Nim", moves, prompt("", number=5), settings={"retries": 1, **limits}, fails=where)
    assert "RuntimeError: the board is lost" in completion.episode.failure
    assert completion.episode.attempts == 2 and completion.episode.reward is None


def test_a_role_that_nobody_has_is_a_fault():
    (completion,), _ = play("Nim", moves, prompt("", number=5), names="third")
    line = "Reply.role of respond is 'third', but its class has the roles first, second"
    assert completion.episode.failure.startswith(line)


def test_names_that_roles_can_not_have_are_refused():
    with pytest.raises(FieldError, match=r"environment=.*has the roles \['mean', 'x'\], which must be a list of diff"):
        play("Unnamed", moves, prompt("x"))


def test_a_run_trains_each_role_by_its_own_reward(tiny_model, tmp_path):
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    own = {"kind": "seeds", "count": 8, "environment": {"kind": f"{WORLDS}:Nim", "pays": 0.25}}
    changes = {"train__steps": 2, "train__prompts_per_step": 2, "checkpoint__every": 1, **NO_EVAL}
    tree = episode_recipe(folder, task=own, reward=[{"kind": "environment"}], **changes)
    tree["task"] = own
    tree["algorithm"] = {"preset": "grpo", "advantage": {"kind": "rloo"}}
    assert go(tmp_path / "run", tree).status in ("done", "untrained")
    rows = [row for step in traces(tmp_path / "run")["rollouts"].values() for row in step]
    assert rows and all(json.loads(row["episode"])["failure"] == "" for row in rows)
    assert all(row["players"].keys() == {*PLAYERS} for row in rows)
    refused = {**tree, "algorithm": {**tree["algorithm"], "advantage": {"kind": "remax"}}}
    with pytest.raises(UserError, match="compares with one greedy episode, not with each role"):
        go(tmp_path / "refused", refused)
