"""Several roles of one policy, each with its own reward: the expected gradient is that of every player's return."""

import sys
from pathlib import Path

import pytest
import torch

from proxima.core import ADVANTAGES, SURROGATES
from proxima.core.advantage.token import Gae
from proxima.core.aggregate import SequenceMeanTokenSum
from proxima.core.loss import policy_loss

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
try:
    from agent_world import RoleWorld
finally:
    sys.path.pop(0)

EXACT = {"rtol": 0, "atol": 1e-9}
RLOO, TURNS = ADVANTAGES["rloo"](), ADVANTAGES["turn_returns"]()
GAE = Gae(gamma=1.0, lam=1.0, whiten=False)


def loss(batch):
    return policy_loss(batch, surrogate=SURROGATES["reinforce"](), aggregate=SequenceMeanTokenSum()).value


def expected(world, advantage):
    policy = world.policy(0)
    moments = world.moments(policy, world.log_prob(policy), loss, advantage=advantage, group_size=2)
    return moments.mean


def bias(world, advantage):
    true = world.gradient(world.policy(0))
    return float((expected(world, advantage) - true).norm() / true.norm())


@pytest.mark.slow
@pytest.mark.parametrize("game", ["talk", "zero_sum", "common", "proposals"])
@pytest.mark.parametrize("advantage", [RLOO, TURNS, GAE], ids=["rloo", "turn_returns", "gae"])
def test_the_expected_gradient_is_each_player_s_own(game, advantage):
    """E[g] = Σ_p ∂J_p/∂θ_p over all pairs of episodes; roles share rows of the policy, and may not act at all."""
    world = RoleWorld(game=game)
    torch.testing.assert_close(expected(world, advantage), world.gradient(world.policy(0)), **EXACT)


def test_what_it_is_the_gradient_of():
    common, zero_sum = RoleWorld(game="common"), RoleWorld(game="zero_sum")
    policy = common.policy(0)
    torch.testing.assert_close(common.gradient(policy), common.shared_gradient(policy, "a"), **EXACT)
    summed = zero_sum.shared_gradient(policy, "a") + zero_sum.shared_gradient(policy, "b")
    assert float(summed.norm()) < 1e-12 < 0.1 < float(zero_sum.gradient(policy).norm())


@pytest.mark.slow
@pytest.mark.parametrize("game", ["talk", "zero_sum", "proposals"])
def test_one_baseline_for_all_roles_is_biased(game):
    """Another role's reward of the same episode depends on what this one wrote."""
    assert bias(RoleWorld(game=game, pooled=True), RLOO) > 0.1


@pytest.mark.slow
def test_a_role_without_a_reward_where_it_did_not_act_is_trained_too_little():
    """The other episode then gives it no baseline, and the role no advantage: fewer the more rarely it acts."""
    assert bias(RoleWorld(game="talk", absent=False), RLOO) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("game", ["talk", "proposals"])
def test_a_standard_deviation_per_role_is_biased(game):
    assert bias(RoleWorld(game=game), ADVANTAGES["grpo"](scale="group")) > 0.05
