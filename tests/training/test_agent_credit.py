"""Credit over the turns of an agent: its conversations overlap in time, and the rewards of its tokens do not care."""

import sys
from pathlib import Path

import pytest
import torch

from proxima.core import ADVANTAGES, SURROGATES
from proxima.core.advantage.token import Gae
from proxima.core.aggregate import SequenceMeanTokenSum
from proxima.core.loss import policy_loss
from proxima.data.packed_batch import pack
from proxima.data.players import contributions_of
from proxima.training.batch_builder import BatchBuilder
from proxima.training.episode_tokens import EpisodeTokens
from tests.rollout.episodes.test_agent_player import Scripted, play
from tests.training.episodes import forked, group_of, model, path, seen

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
try:
    from agent_world import AgentWorld
finally:
    sys.path.pop(0)

AGENTS = {"rewrites": "rewrites_its_memory", "helper": "asks_between_turns"}
UNBIASED = {
    "rloo": ADVANTAGES["rloo"](),
    "turn_returns": ADVANTAGES["turn_returns"](),
    "gae": Gae(gamma=1.0, lam=1.0, whiten=False),
}


def loss(batch):
    return policy_loss(batch, surrogate=SURROGATES["reinforce"](), aggregate=SequenceMeanTokenSum()).value


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "advantage"), [("helper", "rloo"), ("rewrites", "turn_returns"), ("helper", "gae")])
def test_the_expected_gradient_is_that_of_the_return(agent, advantage):
    """E[g] = ∇J over all pairs of episodes, whatever an untrained critic says."""
    world = AgentWorld(agent=agent)
    policy = world.policy(0)
    moments = world.moments(policy, world.log_prob(policy), loss, advantage=UNBIASED[advantage], group_size=2)
    torch.testing.assert_close(moments.mean, world.gradient(policy), rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_the_world_s_episodes_are_those_of_a_real_agent(agent):
    """The paths of a conversation, their turns and their order."""
    (completion,) = play(Scripted(lambda context, request: f"answer {request.turn}"), AGENTS[agent])
    turns = [[span.turn for span in path.episode.turns] for path in completion.paths]
    expected = AgentWorld(agent=agent).episode((1, 1, 1))
    assert turns == [[span.turn for span in path.episode.turns] for path in expected.paths]
    assert completion.episode.reward == 1.0 and completion.text == "answer 2"


@pytest.mark.parametrize("agent", AGENTS)
def test_turns_that_saw_other_prompts_are_in_other_states(agent):
    world = AgentWorld(agent=agent)
    episodes = [world.episode((1, 2, 1), 0), world.episode((2, 2, 1), 1)]
    group = group_of(0, episodes, [1.0, 0.0])
    items = BatchBuilder(advantage=ADVANTAGES["grpo"](), selection=()).step_batch([group], 1).completions
    tokens = EpisodeTokens(pack(items), contributions_of([group]))
    rewards = tokens.rewards(torch.zeros(len(tokens.batch.loss_mask)), {"group", "turn", "state"})
    assert rewards.turn[tokens.loss_mask].tolist() == [0, 1, 2] * 2  # in time, whichever path has them
    states = {}
    for i, begin in enumerate(rewards.cu_seqlens[:-1].tolist()):
        for at in range(begin, rewards.cu_seqlens[i + 1]):
            states[i, int(rewards.turn[at])] = int(rewards.state[at])
    assert states[0, 0] == states[1, 0] and states[0, 1] != states[1, 1]
    assert len({states[0, turn] for turn in range(3)}) == 3
    assert (states[0, 2] == states[1, 2]) == (agent == "helper")  # both have seen that the helper said 2


def test_columns_return_to_their_paths():
    """Two helpers between the turns of the main conversation: the order of time is not its own inverse."""
    completion = forked(
        path(model([5], turn=1)),
        path(model([6], turn=2)),
        path(model([7], turn=0), seen([8], turn=0), model([9], turn=3)),
    )
    groups = [group_of(0, [completion], [1.0])]
    batch = BatchBuilder(advantage=ADVANTAGES["grpo"](), selection=()).step_batch(groups, 1)
    tokens = EpisodeTokens(pack(batch.completions), contributions_of(groups))
    column = torch.arange(5.0)  # turns 1, 2, 0, an observation, turn 3
    assert tokens.in_time(column)[tokens.loss_mask].tolist() == [2.0, 0.0, 1.0, 4.0]
    assert tokens.in_paths(tokens.in_time(column)).tolist() == column.tolist()
