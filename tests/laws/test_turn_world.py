"""Credit over turns where the policy chooses when to stop: what is unbiased, and the bias of what is not."""

from functools import partial

import pytest
import torch

from proxima.core import ADVANTAGES
from proxima.core.aggregate import SequenceMeanTokenSum
from proxima.core.loss import policy_loss
from proxima.core.surrogate import SURROGATES
from scripts.enumerable_world import TurnWorld

WORLD = TurnWorld()
EXACT = {"rtol": 0, "atol": 1e-10}
BIASED = partial(ADVANTAGES["turn_returns"], baseline="biased_per_turn")


def gradient(world, advantage, group_size):
    """The expectation over every group of episodes, on policy."""

    def loss(batch):
        return policy_loss(batch, surrogate=SURROGATES["reinforce"](), aggregate=SequenceMeanTokenSum()).value

    policy = world.policy(0)
    moments = world.moments(policy, world.log_prob(policy), loss, advantage=advantage, group_size=group_size)
    return moments.mean


def test_episodes_are_paid_by_the_turn():
    assert WORLD.completions == [(0,), (1, 0), (2, 0), (1, 1), (1, 2), (2, 1), (2, 2)]
    assert WORLD.turn.tolist() == [0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    first = WORLD.turn_reward[WORLD.turn == 0]
    assert first[1] == first[3] == first[4] and len(first.unique()) == 3  # by the action, not by what comes after it
    assert float(WORLD.reward[1]) == pytest.approx(float(first[1] + WORLD.turn_reward[2]))


LONGER = TurnWorld(horizon=3, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "kind", "group_size"),
    [(WORLD, "rloo", 2), (WORLD, "turn_returns", 2), (WORLD, "turn_returns", 3), (LONGER, "turn_returns", 2)],
)
def test_leave_one_out_is_unbiased(world, kind, group_size):
    result = gradient(world, ADVANTAGES[kind](), group_size)
    torch.testing.assert_close(result, world.gradient(world.policy(0)), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [2, 3])
def test_the_bias_per_turn_has_its_closed_form(group_size):
    true = WORLD.gradient(WORLD.policy(0))
    bias = gradient(WORLD, BIASED(), group_size) - true
    torch.testing.assert_close(bias, WORLD.bias_per_turn(WORLD.policy(0), group_size), **EXACT)
    assert float(bias.norm() / true.norm()) > 0.1


def test_with_many_episodes_a_further_turn_costs_its_mean_reward():
    leaf = WORLD.policy(0).requires_grad_()
    likelihood = WORLD.probability(WORLD.log_prob(leaf))[1:]  # of the episodes with a second turn
    second = WORLD.turn_reward[WORLD.turn == 1]
    mean = (likelihood * second).sum().detach() / likelihood.sum().detach()
    (slope,) = torch.autograd.grad(-mean * likelihood.sum(), leaf)
    torch.testing.assert_close(WORLD.bias_per_turn(leaf, 1000), slope, **EXACT)
    assert float(slope[0, 0]) > 0  # the logit of stopping after the first turn


def test_where_all_episodes_have_as_many_turns_it_has_no_bias():
    """Both turns of both episodes count: what stops early has no probability."""
    policy = WORLD.policy(0)
    policy[0, 0] = -1e3
    torch.testing.assert_close(WORLD.bias_per_turn(policy, 3), torch.zeros_like(policy), **EXACT)
